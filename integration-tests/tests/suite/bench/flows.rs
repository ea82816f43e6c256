//! Tests of `rdmc bench flows`: what it measures, two hosts' ends, and refused arguments.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use serde_json::Value;

use super::{positive, refused};
use crate::program::{code, command, events, finish, rdmc, text};

fn measured(arguments: &str) -> Vec<Value> {
    let arguments: Vec<&str> = ["bench", "flows", "--json"].into_iter().chain(arguments.split(' ')).collect();
    let output = rdmc(&arguments);
    assert_eq!(code(&output), 0, "{arguments:?}: {output:?}");
    events(&output)
}

/// Checks that a flow was measured alone, and beside the others if there are any.
fn check(results: &[Value], flows: &[&str], fabric: &str) {
    let settings: &[&str] = if flows.len() > 1 { &["alone", "beside"] } else { &["alone"] };
    let wanted: Vec<_> =
        (1..).zip(flows).flat_map(|(n, flow)| settings.iter().map(move |set| (n, *flow, *set))).collect();
    let text = |result: &Value, name: &str| result[name].as_str().unwrap().to_owned();
    let found: Vec<_> = results
        .iter()
        .map(|result| (result["number"].as_u64().unwrap(), text(result, "flow"), text(result, "setting")))
        .collect();
    let found: Vec<_> = found.iter().map(|(n, flow, set)| (*n, flow.as_str(), set.as_str())).collect();
    assert_eq!(found, wanted);
    for result in results {
        assert_eq!(result["fabric"], fabric);
        positive(result, "rate");
        positive(result, "message_rate");
        let times = ["median", "p99", "p999", "max"].map(|name| result["seconds"][name].as_f64().unwrap());
        assert!(times.is_sorted() && times[0] > 0.0, "{result}");
        let beside = result["setting"] == "beside";
        for ratio in ["share", "rate_to_alone", "median_to_alone", "p99_to_alone"] {
            match beside {
                true => positive(result, ratio),
                false => assert_eq!(result[ratio], Value::Null, "{ratio}"),
            }
        }
        for cpu in ["cpu_source", "cpu_target"] {
            match fabric {
                "sim" => assert_eq!(result[cpu], Value::Null),
                _ => positive(result, cpu),
            }
        }
    }
    let shares: f64 = results.iter().filter_map(|result| result["share"].as_f64()).sum();
    assert!(flows.len() == 1 || (shares - 1.0).abs() < 1e-6, "{shares}");
}

#[test]
fn every_verb_is_measured_alone_and_beside_the_others() {
    let flows = ["send:64k:depth=4", "write:64:poll", "write-imm:1000:receives=3", "read:100k:hybrid:depth=2"];
    let options = flows.map(|flow| format!("-f {flow}")).join(" ");
    let quick = "--count 20 --warm-up 0.02 --repetitions 1";
    for fabric in ["tcp", "mem"] {
        check(&measured(&format!("{options} --fabric {fabric} {quick}")), &flows, fabric);
    }
    if cfg!(target_os = "linux") {
        let alone = ["read:1M:core=0:far-core=0"];
        check(&measured(&format!("-f {} --fabric shm {quick}", alone[0])), &alone, "shm");
    }
    let counted = ["write:1k:depth=30", "send:10"];
    check(&measured("-f write:1k:depth=30 -f send:10 --count 50 --repetitions 2"), &counted, "tcp");
}

#[test]
fn a_message_longer_than_the_window_counts_in_proportion() {
    let results = measured("-f send:256M --duration 0.001 --warm-up 0.001 --repetitions 1");
    positive(&results[0], "rate");
    assert!(results[0]["rate"].as_f64().unwrap() < 1e12, "{results:?}");
}

#[test]
fn the_model_plays_flows_alike_each_time() {
    let flows = ["write:10:poll", "send:1M:poll"];
    let play = || measured("-f write:10:poll -f send:1M:poll --fabric sim --repetitions 1");
    let results = play();
    check(&results, &flows, "sim");
    assert_eq!(results, play());
    // A mouse beside an elephant waits behind what has left the elephant's queue: 2.1 times as long.
    let beside = results[1]["median_to_alone"].as_f64().unwrap();
    assert!((1.8..2.6).contains(&beside), "{beside}");
}

/// A process that starts targets, as on another host.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start() -> Self {
        let mut command = command(&["bench", "flows", "--listen", "127.0.0.1:0", "--json"]);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let listening: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(listening["event"], "listening");
        Self { child, address: listening["address"].as_str().unwrap().to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn flows_go_to_other_hosts_in_turn() {
    let servers = [Server::start(), Server::start()];
    let to = servers.each_ref().map(|server| server.address.clone()).join(",");
    let flows = ["send:1k", "read:1k", "write:1k"];
    let options = "-f send:1k -f read:1k -f write:1k --count 50 --repetitions 1";
    check(&measured(&format!("{options} --to {to}")), &flows, "tcp");
}

#[test]
fn a_server_of_targets_refuses_what_it_cannot_do_and_goes_on() {
    let server = Server::start();
    let says = |line: &[u8]| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        // It may be closed before all is written.
        let _ = stream.write_all(line);
        let mut answer = String::new();
        let _ = BufReader::new(stream).read_line(&mut answer);
        answer
    };
    // These ask for nothing.
    let idle: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    for (line, reason) in [
        (&b"GET / HTTP/1.1\r\n"[..], "no rdmc of this version"),
        (b"{\"version\":1,\"flow\":\"write:9G\",\"fabric\":\"tcp\"}\n", "1 byte to 1 GiB"),
        (b"{\"version\":2,\"flow\":\"write:1\",\"fabric\":\"tcp\"}\n", "version 1"),
        (b"{\"version\":1,\"flow\":\"send:1G:depth=1024\",\"fabric\":\"tcp\"}\n", "are available"),
        (b"{\"version\":1,\"flow\":\"write:1\",\"fabric\":\"mem\"}\n", "mem joins no processes"),
        (&[b'x'; 8 << 10], "8192 bytes"),
    ] {
        let answer = says(line);
        assert!(answer.contains(reason), "{answer:?} instead of {reason:?}");
    }
    let to = &server.address;
    check(&measured(&format!("-f send:1k --count 50 --repetitions 1 --to {to}")), &["send:1k"], "tcp");
    drop(idle);
}

#[cfg(target_os = "linux")]
#[test]
fn a_target_that_is_gone_ends_the_measurement() {
    use crate::program::{children_of, wait_until};

    let server = Server::start();
    let flows = ["bench", "flows", "-f", "send:1M", "--duration", "3600", "--to", &server.address];
    let flows = command(&flows).spawn().unwrap();
    wait_until("the target runs", || !children_of(server.child.id(), "internal-bench-node\0flow-target\0").is_empty());
    drop(server);
    let output = finish(flows);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(text(&output.stderr).contains("send:1M"), "{output:?}");
}

#[test]
fn flows_that_make_no_sense_are_refused_with_the_remedy() {
    for (wrong, remedy) in [
        ("--fabric tcp", "--flow"),
        ("-f write", "such as write:1M"),
        ("-f write:1M:fast", "far-core=N"),
        ("-f write:64:inline", "--fabric verbs"),
        ("-f write:64:sl=3 --fabric shm", "--fabric verbs"),
        ("-f write:64:core=0 --fabric sim", "--fabric tcp, shm or verbs"),
        ("-f write:64:hybrid --fabric sim", "--fabric tcp, shm or verbs"),
        ("-f write:64:core=1000", "core 1000 cannot be used"),
        ("-f write:64 --fabric shm --to node2:7472", "--to needs"),
        ("-f write:64 --device rxe0", "--device needs"),
        ("-f write:64 --to node2", "HOST:PORT"),
        ("-f write:64 --count 5 --fabric sim", "give --duration"),
        ("-f write:64 --count 5 --duration 5", "cannot be used with"),
        ("-f write:64 --fabric sim --duration 2", "at most 1 s"),
        ("--listen 127.0.0.1:0 --repetitions 5", "cannot be used with"),
        ("-f write:64 --duration 0", "0.001 to 3600"),
        ("-f read:1G:depth=1024", "are available"),
        ("--listen 127.0.0.1:0 -f write:64", "cannot be used with"),
        ("-n 2 flows -f write:64", "cannot be used with"),
    ] {
        let arguments: Vec<&str> = wrong.split(' ').collect();
        let flows = if wrong.contains("flows") { &["bench"][..] } else { &["bench", "flows"] };
        refused(&rdmc(&[flows, &arguments].concat()), remedy, wrong);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ends_of_flows_end_when_the_measurement_is_killed() {
    let flows = ["bench", "flows", "-f", "send:1M:poll", "--duration", "3600"];
    super::none_outlives(&flows, "internal-bench-node\0flow-", 2);
}
