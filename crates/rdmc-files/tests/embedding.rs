//! A program that embeds the crate: senders and receivers in one process, over loopback.

#![expect(clippy::unwrap_used, reason = "nothing goes on after a failure")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use rdmc_files::{
    Event, FabricSelection, FabricSettings, FileReceiver, FileSender, PeerFailure, Sending, TransferError,
};
use tempfile::TempDir;

/// Writes a file of so many bytes.
fn file(dir: &TempDir, name: &str, len: usize) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, (0..=250).cycle().take(len).collect::<Vec<u8>>()).unwrap();
    path
}

async fn receiver(dir: &TempDir) -> FileReceiver {
    FileReceiver::builder(dir.path()).fabric(tcp()).bind("127.0.0.1:0").await.unwrap()
}

fn tcp() -> FabricSettings {
    FabricSettings::new(FabricSelection::Tcp)
}

fn send(receivers: &[&FileReceiver], file: &Path) -> Sending {
    let addresses = receivers.iter().map(|receiver| receiver.local_address());
    FileSender::builder(addresses).fabric(tcp()).block_size(4096).build().unwrap().send([file])
}

/// Returns the names of events, without progress.
fn name(event: &Event) -> Option<String> {
    let object = serde_json::to_value(event).unwrap();
    let name = object["event"].as_str().unwrap().to_owned();
    (name != "progress").then_some(name)
}

/// Drives a receiver until a session has ended; returns its events.
async fn until_ended(receiver: &mut FileReceiver) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(happened) = receiver.next().await {
        let ends = matches!(happened.event, Event::Done { .. } | Event::Declined { .. } | Event::Failed(_));
        assert_eq!(happened.session.is_none(), matches!(happened.event, Event::Listening { .. }));
        events.push(happened.event);
        if ends {
            break;
        }
    }
    events
}

#[tokio::test]
async fn both_ends_say_what_happens_and_the_file_is_there() {
    let (source, first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut at_first, mut at_second) = (receiver(&first).await, receiver(&second).await);
    let path = file(&source, "file", 100_000);
    let sending = send(&[&at_first, &at_second], &path);
    let (sent, first_events, second_events) =
        tokio::join!(sending.collect::<Vec<_>>(), until_ended(&mut at_first), until_ended(&mut at_second));
    assert_eq!(sent.iter().filter_map(name).collect::<Vec<_>>(), ["started", "file", "done"]);
    for events in [first_events, second_events] {
        let names: Vec<_> = events.iter().filter_map(name).collect();
        assert_eq!(names, ["listening", "started", "file", "done"]);
    }
    for dir in [first, second] {
        assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), std::fs::read(&path).unwrap());
    }
}

#[tokio::test]
async fn an_error_names_the_receiver_that_refused() {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let builder = FileReceiver::builder(dir.path()).fabric(tcp()).bytes_max(10);
    let mut small = builder.bind("127.0.0.1:0").await.unwrap();
    let sending = send(&[&small], &file(&source, "file", 100));
    let (sent, received) = tokio::join!(sending.outcome(), until_ended(&mut small));
    let error = sent.unwrap_err();
    assert!(matches!(error, TransferError::Refused { .. }), "{error}");
    let [failed] = error.failed() else { panic!("{error:?}") };
    assert_eq!(
        (failed.node(), failed.address(), failed.cause()),
        (1, Some(small.local_address()), PeerFailure::Refused)
    );
    assert_eq!(received.iter().filter_map(name).collect::<Vec<_>>(), ["listening", "declined"]);
    // It goes on listening.
    let sending = send(&[&small], &file(&source, "short", 10));
    let (sent, _) = tokio::join!(sending.outcome(), until_ended(&mut small));
    assert_eq!(sent.unwrap().bytes, 10);
}

#[tokio::test]
async fn a_sender_that_is_stopped_says_so_and_its_receiver_knows_who_left() {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut receiver = receiver(&dir).await;
    let mut sending = send(&[&receiver], &file(&source, "file", 64 << 20));
    let stopped = async {
        while let Some(event) = sending.next().await {
            if matches!(event, Event::Started { .. }) {
                sending.stop_handle().stop();
            }
        }
        sending.outcome().await
    };
    let (stopped, received) = tokio::join!(stopped, until_ended(&mut receiver));
    assert_eq!(stopped, Err(TransferError::Stopped));
    let Some(Event::Failed(TransferError::Partial { failed, .. })) = received.last() else { panic!("{received:?}") };
    assert_eq!((failed[0].node(), failed[0].cause()), (0, PeerFailure::Left));
}

#[tokio::test]
async fn a_receiver_that_drains_finishes_what_is_under_way_and_its_stream_ends() {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut receiver = receiver(&dir).await;
    let sending = send(&[&receiver], &file(&source, "file", 8 << 20));
    let handle = receiver.stop_handle();
    let drained = async {
        let mut names = Vec::new();
        while let Some(happened) = receiver.next().await {
            if matches!(happened.event, Event::Started { .. }) {
                handle.drain(Duration::from_secs(600));
            }
            names.extend(name(&happened.event));
        }
        names
    };
    let (sent, names) = tokio::join!(sending.outcome(), drained);
    assert_eq!(sent.unwrap().files, 1);
    assert_eq!(names, ["listening", "started", "file", "done"]);
}

#[test]
fn settings_that_make_no_sense_are_found_when_they_are_built() {
    let none: [&str; 0] = [];
    let wrong = [
        FileSender::builder(none).build(),
        FileSender::builder(["host"]).build(),
        FileSender::builder(["host:1"]).block_size(0).build(),
        FileSender::builder(["host:1"]).fabric(FabricSettings::default().encrypt(true)).build(),
        FileSender::builder(["host:1"]).fabric(tcp().device("rxe0".to_owned())).build(),
    ];
    for built in wrong {
        let error = built.unwrap_err();
        assert!(matches!(error, TransferError::Request { .. }), "{error}");
    }
}
