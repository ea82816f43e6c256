//! Tests of bad conditions: transfers that succeed all the same, and refusals with their reason and remedy.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use tempfile::TempDir;

use super::{Lab, Undo, counters, receivers, run, send, source_of, started};
use crate::program::{Receiver, assert_all_have, code, command, finish, rdmc, text, tree, wait_until};

#[test]
fn lost_packets_are_sent_again() {
    let Some(lab) = Lab::enter(4) else { return };
    let (source, file) = source_of(4 << 20);
    let repetitions = || counters(1..=lab.nodes, &["duplicate_request", "out_of_seq_request", "rcvd_seq_err"]);
    let timed = || {
        let begun = Instant::now();
        delivers(&file, &source);
        begun.elapsed()
    };
    let (whole, before) = (timed(), repetitions());
    // Both directions of node 2.
    let lossy = ["veth2", "port2"];
    let _undo = Undo(|| lossy.iter().for_each(|interface| run(&format!("tc qdisc del dev {interface} root"))));
    lossy.iter().for_each(|interface| run(&format!("tc qdisc add dev {interface} root netem loss 1%")));
    let lost = timed();
    let repetitions = repetitions() - before;
    println!(
        "4 MiB to 3 receivers: {whole:?} without loss, {lost:?} with 1% in both directions, {repetitions} repetitions"
    );
    assert!(repetitions > 0);
}

#[test]
fn members_with_different_packet_lengths_agree() {
    let Some(_lab) = Lab::enter(4) else { return };
    let (source, file) = source_of(4 << 20);
    let _undo = Undo(|| run("ip link set veth2 mtu 9000"));
    run("ip link set veth2 mtu 1500");
    let before = counters(2..=2, &["rcvd_pkts"]);
    delivers(&file, &source);
    // Packets of 1024 bytes, where all others take 4096.
    assert!(counters(2..=2, &["rcvd_pkts"]) - before >= 4096);
}

#[test]
fn without_libibverbs_the_package_is_named_and_auto_takes_tcp() {
    let Some(_lab) = Lab::enter(4) else { return };
    let found =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(|dir| Path::new(dir).join("libibverbs.so.1"));
    let here = found.into_iter().find(|path| path.exists()).expect("the lab has libibverbs");
    let aside = PathBuf::from(format!("{}.aside", here.display()));
    let _undo = Undo(|| std::fs::rename(&aside, &here).unwrap());
    std::fs::rename(&here, &aside).unwrap();
    refuses(&["--device", "rxe1"], &["libibverbs.so.1", "rdma-core"]);
    auto_takes_tcp("libibverbs");
}

#[test]
fn without_a_device_the_remedy_is_named_and_auto_takes_tcp() {
    let Some(lab) = Lab::enter(4) else { return };
    let nodes = 1..=lab.nodes;
    let _undo =
        Undo(|| nodes.clone().for_each(|node| run(&format!("rdma link add rxe{node} type rxe netdev veth{node}"))));
    nodes.clone().for_each(|node| run(&format!("rdma link delete rxe{node}")));
    refuses(&[], &["no RDMA device", "rdma link add"]);
    auto_takes_tcp("no RDMA device");
}

#[test]
fn a_device_of_a_wrong_name_is_answered_by_the_right_ones() {
    let Some(_lab) = Lab::enter(4) else { return };
    refuses(&["--device", "mlx5_0"], &["\"mlx5_0\"", "rxe1, rxe2, rxe3, rxe4"]);
}

#[test]
fn a_port_that_is_down_is_named() {
    let Some(_lab) = Lab::enter(4) else { return };
    let _undo = Undo(|| run("ip link set veth1 up"));
    run("ip link set veth1 down");
    refuses(&["--device", "rxe1"], &["port 1 of rxe1 is DOWN"]);
}

#[test]
fn a_port_without_an_address_is_named() {
    let Some(_lab) = Lab::enter(4) else { return };
    // The kernel follows with a delay.
    let has_address = || {
        let devices = rdmc_verbs::devices().unwrap();
        let ports = devices.iter().filter(|device| device.name == "rxe1").flat_map(|device| &device.ports);
        ports.flat_map(|port| &port.gids).any(|gid| gid.address() == IpAddr::from([10, 77, 0, 1]))
    };
    let _undo = Undo(|| {
        run("ip addr add 10.77.0.1/24 dev veth1");
        wait_until("the device has its address again", has_address);
    });
    run("ip addr flush dev veth1");
    wait_until("the device has lost its address", || !has_address());
    let mut config = rdmc_verbs::VerbsConfig::default();
    config.device = Some("rxe1".into());
    config.address = Some([10, 77, 0, 1].into());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let refused = rdmc_verbs::VerbsFabric::open(config).unwrap_err();
    assert!(refused.to_string().starts_with("port 1 of rxe1 has no address of the kind asked for"), "{refused}");
}

#[test]
fn the_limit_of_locked_memory_is_named_with_the_need_and_the_remedy() {
    let Some(_lab) = Lab::enter(4) else { return };
    let demo = command(&["demo", "--fabric", "verbs", "--nodes", "2", "--size", "8MiB", "--json"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -l 64 && exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock \"$@\"", "sh"]);
    let output = limited.arg(demo.get_program()).args(demo.get_args()).env_remove("RDMC_LOG").output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for word in ["RLIMIT_MEMLOCK", "65536 bytes", "8388608 bytes", "ulimit -l"] {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
}

#[test]
fn a_receiver_without_rdma_is_named_or_reached_by_tcp() {
    let Some(_lab) = Lab::enter(4) else { return };
    let (source, file) = source_of(100_000);
    let mut mixed = receivers(&[2], &[]);
    mixed.push(Receiver::start_at("10.77.0.3:0", &["--fabric", "tcp"]));
    let sent = send(&[&file], &mixed, &[]);
    assert_eq!(code(&sent), 4, "{sent:?}");
    assert!(text(&sent.stderr).contains(&mixed[1].address), "{sent:?}");
    assert!(mixed.iter().all(|receiver| tree(receiver.dir.path()).is_empty()));

    let auto = ["10.77.0.2:0", "10.77.0.3:0"].map(|address| Receiver::start_at(address, &["--fabric", "auto"]));
    let without = [Receiver::start_at("10.77.0.4:0", &["--fabric", "tcp"])];
    for receivers in [&auto[..], &without] {
        let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
        let mut command = command(&["send", "--json", "--to", &to]);
        let sent = finish(command.arg(&file).spawn().unwrap());
        assert_eq!(code(&sent), 0, "{sent:?}");
        let told = started(&sent);
        let expected = if receivers.len() == auto.len() { "verbs" } else { "tcp" };
        assert_eq!(told["fabric"], expected, "{told}");
        println!("auto: {} because {}", told["fabric"], told["fabric_reason"]);
        for receiver in receivers {
            assert_eq!(tree(receiver.dir.path()), tree(source.path()));
        }
    }
}

/// Sends a file from node 1 to three receivers, and checks that they get it whole.
fn delivers(file: &PathBuf, source: &TempDir) {
    let receivers = receivers(&[2, 3, 4], &["--once"]);
    let sent = send(&[file], &receivers, &["--block-size", "64k"]);
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_eq!(started(&sent)["fabric"], "verbs");
    assert_all_have(receivers, source);
}

/// Checks that the program does not start on RDMA, and prints all of `words`.
fn refuses(options: &[&str], words: &[&str]) {
    let output = rdmc(&[&["demo", "--nodes", "2", "--size", "1MiB", "--fabric", "verbs"], options].concat());
    let said = text(&output.stderr);
    assert_eq!(code(&output), 2, "{said}");
    for word in words {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
}

/// Checks that a sender and a receiver with a free choice take TCP, and give `reason` as the reason.
fn auto_takes_tcp(reason: &str) {
    let (source, file) = source_of(100_000);
    let receiver = Receiver::start_at("10.77.0.2:0", &["--once"]);
    let mut command = command(&["send", "--json", "--to", &receiver.address]);
    let sent = finish(command.arg(&file).spawn().unwrap());
    assert_eq!(code(&sent), 0, "{sent:?}");
    let told = started(&sent);
    assert_eq!(told["fabric"], "tcp", "{told}");
    assert!(told["fabric_reason"].as_str().unwrap().contains(reason), "{told}");
    assert_all_have([receiver], &source);
}
