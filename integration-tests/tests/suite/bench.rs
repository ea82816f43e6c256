//! Tests of `rdmc bench` as a user runs it: a tiny sweep, and refused arguments.

use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{code, command, events, finish, rdmc, text};

mod flows;

#[test]
fn a_sweep_measures_every_configuration_and_the_machine() {
    let lists = ["bench", "--nodes", "2,3", "--size", "1,64k", "--fabric", "tcp", "--rounds", "3", "--json"];
    let output = rdmc(&lists);
    assert_eq!(code(&output), 0, "{output:?}");
    let events = events(&output);
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
    assert_eq!(named("setting").len(), 1);
    let wanted: Vec<(u64, u64)> = vec![(2, 1), (2, 65536), (3, 1), (3, 65536)];
    let found = |events: &[&Value]| -> Vec<(u64, u64)> {
        events.iter().map(|event| (event["nodes"].as_u64().unwrap(), event["bytes"].as_u64().unwrap())).collect()
    };
    assert_eq!(found(&named("limits")), wanted);
    assert_eq!(found(&named("result")), wanted);
    for limits in named("limits") {
        for rate in ["memcpy_rate", "copy_floor_plain_rate", "stream_rate", "streams_rate", "streams_seconds"] {
            positive(limits, rate);
        }
    }
    for result in named("result") {
        assert_eq!((&result["by"], &result["fabric"], &result["rounds"]), (&"rdmc".into(), &"tcp".into(), &3.into()));
        let seconds = &result["seconds"];
        for share in ["median", "p10", "p90", "p99", "min", "max"] {
            positive(seconds, share);
        }
        let ordered = ["min", "p10", "median", "p90", "p99", "max"].map(|share| seconds[share].as_f64().unwrap());
        assert!(ordered.is_sorted(), "{ordered:?}");
        for rate in ["receiver_rate", "aggregate_rate", "message_rate", "to_copy_floor", "to_streams", "to_memcpy"] {
            positive(result, rate);
        }
        let receivers = result["nodes"].as_f64().unwrap() - 1.0;
        let together = result["aggregate_rate"].as_f64().unwrap() / result["receiver_rate"].as_f64().unwrap();
        assert!((together - receivers).abs() < 1e-6, "{together}");
        let floor = result["aggregate_rate"].as_f64().unwrap() / result["to_copy_floor"].as_f64().unwrap();
        assert!((floor / result["copy_floor_rate"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{result}");
        assert!(result["skew_seconds"].as_f64().unwrap() <= ordered[5], "{result}");
        assert!(result["cpu_seconds_per_gib"].as_f64().unwrap() > 0.0, "{result}");
        assert_eq!(result["seconds_to_rdmc"], Value::Null);
    }
}

#[test]
fn the_copy_floor_is_measured_in_turn_with_long_rounds() {
    let output = rdmc(&["bench", "--nodes", "3", "--size", "1M,16M", "--rounds", "2", "--json"]);
    assert_eq!(code(&output), 0, "{output:?}");
    let events = events(&output);
    let before = |bytes: &Value| {
        let limits = events.iter().find(|event| event["event"] == "limits" && event["bytes"] == *bytes).unwrap();
        let rates = ["copy_floor_plain_rate", "copy_floor_non_temporal_rate"].map(|rate| limits[rate].as_f64());
        rates.into_iter().flatten().fold(0.0, f64::max)
    };
    let results = events.iter().filter(|event| event["event"] == "result");
    let in_turn =
        results.map(|result| (result["copy_floor_rate"].as_f64().unwrap() / before(&result["bytes"]) - 1.0).abs());
    let in_turn: Vec<bool> = in_turn.map(|difference| difference > 1e-9).collect();
    assert_eq!(in_turn, [false, true]);
}

#[cfg(target_os = "linux")]
#[test]
fn one_object_for_all_is_told_apart_from_copies() {
    let lists = "bench --nodes 3 --size 100,1M --groups 2 --delivery private,shared --rounds 2 --json";
    let output = rdmc(&lists.split_whitespace().collect::<Vec<_>>());
    assert_eq!(code(&output), 0, "{output:?}");
    let events = events(&output);
    let results: Vec<&Value> = events.iter().filter(|event| event["event"] == "result").collect();
    let delivered: Vec<_> = results.iter().map(|result| result["delivery"].as_str().unwrap()).collect();
    assert_eq!(delivered, ["private", "private", "shared", "shared"]);
    for result in results {
        positive(&result["seconds"], "median");
        for rate in ["receiver_rate", "aggregate_rate", "to_copy_floor", "to_streams", "to_memcpy"] {
            match result["delivery"] == "shared" {
                true => assert_eq!(result[rate], Value::Null, "{rate}"),
                false => positive(result, rate),
            }
        }
        if result["bytes"] == 100 {
            positive(result, "message_rate");
        }
    }
}

#[test]
fn groups_overlap_and_every_way_to_wait_and_to_print_works() {
    let dir = TempDir::new().unwrap();
    let picture = dir.path().join("plot.svg");
    let lists = "bench --nodes 3 --size 100k --block-size 32k --fabric tcp --rounds 2 --groups 1,4 \
                 --completion event,hybrid,poll --csv --plot";
    let arguments: Vec<&str> = lists.split_whitespace().chain(picture.to_str()).collect();
    let output = rdmc(&arguments);
    assert_eq!(code(&output), 0, "{output:?}");
    let lines = text(&output.stdout);
    let lines: Vec<Vec<&str>> = lines.lines().map(|line| line.split(',').collect()).collect();
    let column = |name: &str| {
        let at = lines[0].iter().position(|column| *column == name).expect("a column of this name");
        lines[1..].iter().map(|line| line[at].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(column("groups"), ["1", "4", "1", "4", "1", "4"]);
    assert_eq!(column("senders"), ["1", "3", "1", "3", "1", "3"]);
    assert_eq!(column("completion"), ["event", "event", "hybrid", "hybrid", "poll", "poll"]);
    let drawn = std::fs::read_to_string(picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("groups 4"), "{drawn}");
}

#[test]
fn what_the_model_chooses_is_measured_and_explained() {
    let lists = "bench --nodes 3 --size 100k --fabric tcp --rounds 2 --explain --algorithm chain --block-size 32k";
    let arguments: Vec<&str> = lists.split(' ').collect();
    let shown = rdmc(&arguments);
    assert_eq!(code(&shown), 0, "{shown:?}");
    assert!(text(&shown.stdout).contains("predicted"), "{shown:?}");
    let output = rdmc(&[&arguments[..], &["--json"]].concat());
    assert_eq!(code(&output), 0, "{output:?}");
    let events = events(&output);
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
    let (results, explained) = (named("result"), named("explanation"));
    assert_eq!((results.len(), explained.len()), (2, 1), "{events:?}");
    let median = |result: &Value| result["seconds"]["median"].as_f64().unwrap();
    // The first result is that of the choice.
    let best = results.iter().copied().min_by(|a, b| median(a).total_cmp(&median(b))).unwrap();
    let explained = explained[0];
    for (told, result) in [("", results[0]), ("best_", best)] {
        for name in ["algorithm", "block_size"] {
            assert_eq!(explained[format!("{told}{name}")], result[name], "{explained}");
        }
    }
    assert_eq!(explained["measured_seconds"], results[0]["seconds"]["median"]);
    assert_eq!(explained["best_seconds"], best["seconds"]["median"]);
    positive(explained, "predicted_seconds");
    assert!(explained["to_best"].as_f64().unwrap() >= 1.0);
}

#[test]
fn lists_that_make_no_sense_are_refused_with_the_remedy() {
    let cases = [
        ("--nodes 1", "2 or more"),
        ("--nodes 2,many", "2 to 64"),
        ("--size 1k,0", "1 byte or more"),
        ("--size 2G", "1 GiB at most"),
        ("--algorithm chain,magic", "possible values"),
        ("--fabric pigeon", "possible values"),
        ("--completion nap", "possible values"),
        ("--senders 2", "more --groups"),
        ("--algorithm hybrid", "--racks"),
        ("--vs lam", "ompi or mpich"),
        ("--vs ompi --groups 2", "--groups at 1"),
        ("--csv --json", "cannot be used with"),
        ("--delivery shared --fabric tcp", "--fabric shm"),
        ("--delivery shared --vs ompi", "at private"),
        ("--csv --explain", "cannot be used with"),
        ("--explain --groups 1,2", "--groups at 1"),
        ("--block-size 0", "or auto"),
        ("--explain --delivery shared --fabric shm", "at private"),
        ("--nodes 64 --size 1G --groups 64", "choose fewer members or a smaller size"),
    ];
    for (wrong, remedy) in cases {
        let arguments: Vec<&str> = ["bench"].into_iter().chain(wrong.split(' ')).collect();
        refused(&rdmc(&arguments), remedy, wrong);
    }
}

#[test]
fn an_mpi_that_is_not_installed_is_named_with_its_package() {
    for (mpi, package) in [("ompi", "libopenmpi-dev"), ("mpich:tcp", "libmpich-dev")] {
        let mut bench = command(&["bench", "--vs", mpi]);
        // No program is installed here.
        let nowhere = TempDir::new().unwrap();
        refused(&finish(bench.env("PATH", nowhere.path()).spawn().unwrap()), package, mpi);
    }
}

fn refused(output: &Output, remedy: &str, what: &str) {
    let said = text(&output.stderr);
    assert_eq!(code(output), 2, "{what}: {output:?}");
    assert!(said.contains(remedy), "{what}: {said}");
    // Nothing was measured.
    assert!(output.stdout.is_empty(), "{what}: {output:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn members_end_when_the_benchmark_is_killed() {
    let bench = ["bench", "--nodes", "4", "--size", "1M", "--fabric", "tcp", "--rounds", "100000"];
    none_outlives(&bench, "internal-bench-node\0member\0", 4);
}

/// Kills a benchmark that has so many processes of a role, and checks that none outlives it.
#[cfg(target_os = "linux")]
fn none_outlives(arguments: &[&str], role: &str, count: usize) {
    use crate::program::{children_of, runs_as, wait_until};

    let mut bench = command(arguments).spawn().expect("the program starts");
    let mut processes = Vec::new();
    wait_until("the processes are started", || {
        processes = children_of(bench.id(), role);
        processes.len() == count
    });
    bench.kill().expect("it can be killed");
    bench.wait().expect("it ends");
    wait_until("the processes end", || !processes.iter().any(|&pid| runs_as(pid, "internal-bench-node")));
}

fn positive(object: &Value, name: &str) {
    assert!(object[name].as_f64().is_some_and(|figure| figure > 0.0 && figure.is_finite()), "{name} of {object}");
}
