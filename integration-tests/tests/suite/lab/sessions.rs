//! Files of a server, and connections through gateways, on devices.

use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::gateway::{Gateway, ask, serve};

/// Options of the processes on the devices of two nodes.
const AT_1: [&str; 4] = ["--fabric", "verbs", "--device", "rxe1"];
const AT_2: [&str; 4] = ["--fabric", "verbs", "--device", "rxe2"];

/// Counts the packets that the devices of both nodes have sent.
fn sent_packets() -> u64 {
    counters(1..=2, &["sent_pkts"])
}

#[test]
fn files_are_got_and_put_by_rdma() {
    let Some(_lab) = Lab::enter(2) else { return };
    let server = Receiver::serve(TempDir::new().unwrap(), "10.77.0.2:0", &[&AT_2[..], &["--writable"]].concat());
    let there = server.dir.path().join("file");
    std::fs::write(&there, pattern((40 << 20) + 1, 1)).unwrap();
    let into = TempDir::new().unwrap();
    let (before, place) = (sent_packets(), format!("{}/file", server.address));
    let got = rdmc(&[&["get", &place, into.path().to_str().unwrap()], &AT_1[..]].concat());
    assert_eq!(code(&got), 0, "{got:?}");
    let here = into.path().join("file");
    assert!(std::fs::read(&here).unwrap() == std::fs::read(&there).unwrap());
    // A packet of a RoCE device has 4 KiB of payload at most.
    assert!(sent_packets() - before >= 10_000, "the bytes have passed the devices");
    std::fs::remove_file(&there).unwrap();
    let put = rdmc(&[&["put", here.to_str().unwrap(), &server.address], &AT_1[..]].concat());
    assert_eq!(code(&put), 0, "{put:?}");
    assert!(std::fs::read(&here).unwrap() == std::fs::read(&there).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_pass_gateways_by_rdma() {
    let Some(_lab) = Lab::enter(2) else { return };
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = targets.local_addr().unwrap().to_string();
    tokio::spawn(serve(targets));
    let exit = [&["--serve", "10.77.0.2:0", "--allow", "127.0.0.0/8"], &AT_2[..]].concat();
    let exit = Gateway::start(&exit);
    let entrance = ["--listen", "127.0.0.1:0", "--peer", &exit.address, "--to", &target];
    let mut entrance = Gateway::start(&[&entrance[..], &AT_1[..]].concat());
    assert_eq!(entrance.event("connected")["fabric"], "verbs");
    let before = sent_packets();
    for (seed, len) in [0, 1, 3_000_000, 100_000].into_iter().enumerate() {
        ask(TcpStream::connect(&entrance.address).await.unwrap(), seed as u64, len).await;
    }
    assert!(sent_packets() > before, "the bytes have passed the devices");
}
