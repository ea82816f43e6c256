//! How `rdmc send` and `recv` end, and what they say of it, to people and to programs.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Receiver, code, command, finish, text};
use crate::survivors::{end, start_send, write_files};

/// Reads what a receiver has said.
fn events(said: &str) -> Vec<Value> {
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_offer_that_is_declined_for_its_list_of_files_is_no_transfer() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 2, 5000);
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once", "--no-overwrite"])];
    std::fs::write(receivers[1].dir.path().join("1"), b"old").unwrap();
    let sent = finish(start_send(&files, &receivers, &[]));
    assert_eq!(code(&sent), 4, "{sent:?}");
    assert!(text(&sent.stderr).contains(&format!("{} refused: 1 exists (--no-overwrite)", receivers[1].address)));
    // Both go on waiting, whoever has declined.
    let sent = finish(start_send(&files[..1], &receivers, &[]));
    assert_eq!(code(&sent), 0, "{sent:?}");
    for (receiver, told) in receivers.into_iter().zip(["receiver 2 refused: 1 exists", "1 exists (--no-overwrite)"]) {
        let (exit, said, dir) = end(receiver);
        assert_eq!(exit, 0, "{said}");
        assert_eq!(std::fs::read(dir.path().join("0")).unwrap(), std::fs::read(&files[0]).unwrap());
        let said = events(&said);
        let declined: Vec<_> = said.iter().filter(|event| event["event"] == "declined").collect();
        assert!(declined.len() == 1 && declined[0]["reason"].as_str().unwrap().starts_with(told), "{said:?}");
        assert!(said.iter().all(|event| event["event"] != "failed"), "{said:?}");
    }
}

#[test]
fn a_special_file_that_is_named_itself_is_a_usage_error() {
    let sent = finish(command(&["send", "/dev/null", "--to", "127.0.0.1:1"]).spawn().unwrap());
    assert_eq!(code(&sent), 2);
    assert!(text(&sent.stderr).contains("/dev/null is neither a file nor a directory"), "{sent:?}");
}
