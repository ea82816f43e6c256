use std::collections::BTreeMap;
use std::path::Path;

use futures::StreamExt;
use tempfile::TempDir;

use super::*;
use crate::TransferError;

/// A server of a directory, which ends with this.
pub(super) struct Served {
    pub(super) dir: TempDir,
    pub(super) address: String,
    serving: tokio::task::JoinHandle<()>,
}

impl Served {
    pub(super) async fn new(writable: bool) -> Self {
        Self::that(|server| server.writable(writable)).await
    }

    pub(super) async fn that(is: impl FnOnce(RemoteServerBuilder) -> RemoteServerBuilder) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = is(RemoteServer::builder(dir.path())).bind("127.0.0.1:0").await.unwrap();
        let address = server.local_address().to_owned();
        Self { dir, address, serving: tokio::spawn(server.serve()) }
    }

    pub(super) fn write(&self, path: &str, bytes: &[u8]) {
        write(self.dir.path(), path, bytes);
    }

    fn get(&self, path: &str, into: &Path) -> RemoteTransfer {
        let location = RemoteLocation::parse(&format!("{}/{path}", self.address), 1).unwrap();
        get(&location.address, vec![location.path], into, RemoteSettings::default())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn write(dir: &Path, path: &str, bytes: &[u8]) {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Returns the text of a failure.
fn refused(outcome: Result<RemoteOutcome, TransferError>) -> String {
    outcome.unwrap_err().to_string()
}

/// Bytes of a file, which differ from those of others.
pub(super) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[7]
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// The files below a directory, and their bytes.
fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fn add(dir: &Path, at: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => add(dir, &path, files),
                false => {
                    let name = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
                    files.insert(name, std::fs::read(&path).unwrap());
                }
            }
        }
    }
    let mut files = BTreeMap::new();
    add(dir, dir, &mut files);
    files
}

/// Writes a tree of long, short and empty files.
fn write_tree(dir: &Path) -> usize {
    write(dir, "long", &content(1, 5_300_000));
    write(dir, "a/empty", b"");
    write(dir, "a/b/block", &content(2, 1 << 20));
    for number in 0..300u16 {
        write(dir, &format!("many/{number}"), &content(number.into(), usize::from(number) * 7));
    }
    303
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_is_got_with_its_bytes_modes_and_times() {
    let served = Served::new(false).await;
    let files = write_tree(served.dir.path());
    let into = tempfile::tempdir().unwrap();
    let outcome = served.get("", into.path()).finish().await.unwrap();
    assert_eq!((outcome.files, outcome.skipped), (files as u64, 0));
    assert_eq!(tree(into.path()), tree(served.dir.path()));
    let time = |dir: &Path| std::fs::metadata(dir.join("a/b/block")).unwrap().modified().unwrap();
    assert_eq!(time(into.path()), time(served.dir.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_is_put_and_stored() {
    let served = Served::new(true).await;
    let from = tempfile::tempdir().unwrap();
    let files = write_tree(from.path());
    std::fs::create_dir(served.dir.path().join("in")).unwrap();
    let sources = ["long", "a", "many"].map(|name| from.path().join(name));
    let into = EntryPath(vec![b"in".to_vec()]);
    let putting = put(&served.address, sources.to_vec(), into, RemoteSettings::default());
    assert_eq!(putting.finish().await.unwrap().files, files as u64);
    assert_eq!(tree(&served.dir.path().join("in")), tree(from.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_fetches_from_another_one_and_tells_its_client() {
    let from = Served::new(false).await;
    let files = write_tree(from.dir.path());
    let to = Served::that(|server| server.writable(true).fetches_from(vec![from.address.clone()])).await;
    std::fs::create_dir(to.dir.path().join("in")).unwrap();
    let into = |path: &str| RemoteLocation::parse(&format!("{}/{path}", to.address), 1).unwrap();
    let all = || vec![EntryPath(Vec::new())];
    let mut copying = copy(&from.address, all(), &into("in"), RemoteSettings::default());
    let (mut listed, mut told, mut last) = (0, BTreeMap::new(), 0);
    while let Some(event) = copying.next().await {
        match event {
            RemoteEvent::Listed { files, .. } => listed = files,
            RemoteEvent::File { path, bytes } => assert_eq!(told.insert(path, bytes), None),
            RemoteEvent::Progress { bytes } => {
                assert!(bytes > last);
                last = bytes;
            }
            RemoteEvent::Skipped { path, reason } => panic!("{path}: {reason}"),
        }
    }
    let outcome = copying.outcome().unwrap().clone().unwrap();
    assert_eq!((outcome.files, listed, outcome.moved), (files as u64, files as u64, outcome.bytes));
    let copied = tree(&to.dir.path().join("in"));
    assert_eq!(copied, tree(from.dir.path()));
    let lens: BTreeMap<_, _> = copied.iter().map(|(path, bytes)| (path.clone(), bytes.len() as u64)).collect();
    assert_eq!((told, last), (lens, outcome.bytes));
    // The next one finds everything there.
    let again = copy(&from.address, all(), &into("in"), RemoteSettings::default()).finish().await.unwrap();
    assert_eq!((again.files, again.moved), (files as u64, 0));
    // What fails at the server that stores is told, whatever it is.
    let missing = vec![EntryPath(vec![b"no".to_vec()])];
    let problem = copy(&from.address, missing, &into("in"), RemoteSettings::default()).finish().await;
    let text = refused(problem);
    assert!(text.contains(&from.address) && text.contains("no does not exist at the server"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_fetches_only_from_those_that_it_may() {
    let from = Served::new(false).await;
    from.write("secret", b"secret");
    let strict = Served::that(|server| server.writable(true).fetches_from(vec!["other:1".to_owned()])).await;
    let unwritable = Served::that(|server| server.fetches_from(vec![from.address.clone()])).await;
    for (to, reason) in [(&strict, "--fetch-from"), (&unwritable, "--writable")] {
        let location = RemoteLocation::parse(&to.address, 1).unwrap();
        let copying = copy(&from.address, vec![EntryPath(Vec::new())], &location, RemoteSettings::default());
        let text = refused(copying.finish().await);
        assert!(text.contains(reason), "{text}");
        assert!(tree(to.dir.path()).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_ends_the_copy_and_the_next_brings_the_rest() {
    let from = Served::new(false).await;
    from.write("long", &content(7, 40 << 20));
    let slow = RemoteSettings { rate: Some(Rate::bytes_per_second(20 << 20)), ..Default::default() };
    let may = vec![from.address.clone()];
    let dir = tempfile::tempdir().unwrap();
    let to = RemoteServer::builder(dir.path()).writable(true).fetches_from(may).settings(slow);
    let mut server = to.bind("127.0.0.1:0").await.unwrap();
    let location = RemoteLocation::parse(server.local_address(), 1).unwrap();
    let all = || vec![EntryPath(Vec::new())];
    let mut copying = copy(&from.address, all(), &location, RemoteSettings::default());
    let begun = async {
        while let Some(event) = copying.next().await {
            if matches!(event, RemoteEvent::Progress { bytes } if bytes > 4 << 20) {
                return;
            }
        }
        panic!("it ended early: {:?}", copying.outcome());
    };
    tokio::select! {
        () = begun => {}
        ended = server.next() => panic!("it ended early: {ended:?}"),
    }
    drop(copying);
    let ended = server.next().await;
    assert!(ended.outcome.is_err() && ended.request.starts_with("fetch / from "), "{ended:?}");
    let serving = tokio::spawn(server.serve());
    let rest = copy(&from.address, all(), &location, RemoteSettings::default()).finish().await.unwrap();
    assert!(rest.moved < rest.bytes, "{rest:?}");
    assert_eq!(tree(dir.path()), tree(from.dir.path()));
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn some_paths_are_got_and_nothing_else() {
    let served = Served::new(false).await;
    write_tree(served.dir.path());
    let into = tempfile::tempdir().unwrap();
    served.get("a/b", into.path()).finish().await.unwrap();
    assert_eq!(tree(into.path()).into_keys().collect::<Vec<_>>(), ["b/block"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_transfer_is_completed_with_the_rest() {
    let served = Served::new(false).await;
    let bytes = content(7, 40 << 20);
    served.write("long", &bytes);
    let into = tempfile::tempdir().unwrap();
    let mut getting = served.get("long", into.path());
    // Until a part of the file is here.
    while let Some(event) = getting.next().await {
        if matches!(event, RemoteEvent::Progress { bytes } if bytes > 8 << 20) {
            break;
        }
    }
    drop(getting);
    let outcome = loop {
        // The part may be in use until the dropped work has ended.
        let outcome = served.get("long", into.path()).finish().await.unwrap();
        if outcome.moved > 0 {
            break outcome;
        }
    };
    assert!(outcome.moved <= 33 << 20, "{outcome:?}");
    assert_eq!(std::fs::read(into.path().join("long")).unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_block_is_all_that_travels() {
    let served = Served::new(false).await;
    let mut bytes = content(7, 8 << 20);
    served.write("long", &bytes);
    let into = tempfile::tempdir().unwrap();
    served.get("long", into.path()).finish().await.unwrap();
    let there = served.dir.path().join("long");
    let time = std::fs::metadata(&there).unwrap().modified().unwrap();
    bytes[3_000_000] ^= 1;
    std::fs::write(&there, &bytes).unwrap();
    std::fs::File::open(&there).unwrap().set_modified(time).unwrap();
    let outcome = served.get("long", into.path()).finish().await.unwrap();
    assert_eq!((outcome.moved, outcome.bytes), (1 << 20, 8 << 20));
    assert_eq!(std::fs::read(into.path().join("long")).unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_outside_the_directory_is_reached() {
    let served = Served::new(true).await;
    let outside = tempfile::tempdir().unwrap();
    write(outside.path(), "secret", b"secret");
    std::os::unix::fs::symlink(outside.path(), served.dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("secret"), served.dir.path().join("file")).unwrap();
    let into = tempfile::tempdir().unwrap();
    for path in ["link", "link/secret", "file"] {
        let error = served.get(path, into.path()).finish().await.unwrap_err();
        assert!(matches!(error, TransferError::Refused { .. }), "{path}: {error}");
    }
    served.get("", into.path()).finish().await.unwrap();
    assert!(tree(into.path()).is_empty());
    let putting = put(
        &served.address,
        vec![outside.path().join("secret")],
        EntryPath(vec![b"link".to_vec()]),
        Default::default(),
    );
    putting.finish().await.unwrap_err();
    assert!(RemoteLocation::parse("host/../etc", 1).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_say_why() {
    let served = Served::new(false).await;
    served.write("there", b"bytes");
    let into = tempfile::tempdir().unwrap();
    let text = refused(served.get("none", into.path()).finish().await);
    assert!(text.ends_with("refuses the session: none does not exist at the server"), "{text}");
    let file = served.dir.path().join("there");
    let text = refused(put(&served.address, vec![file], EntryPath(Vec::new()), Default::default()).finish().await);
    assert!(text.ends_with("this server takes no files: it was not started as writable (--writable)"), "{text}");
    let text = refused(served.get("there", &into.path().join("no")).finish().await);
    assert!(text.contains("create it first"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_into_no_directory_says_what_to_do_and_not_where_the_server_has_its_files() {
    let served = Served::new(true).await;
    served.write("file", b"bytes");
    let from = tempfile::tempdir().unwrap();
    write(from.path(), "model", b"weights");
    for (into, told) in [
        ("none", "the directory none does not exist at the server: create it there first"),
        ("file", "file is no directory at the server"),
    ] {
        let into = EntryPath(vec![into.as_bytes().to_vec()]);
        let putting = put(&served.address, vec![from.path().join("model")], into, RemoteSettings::default());
        let text = refused(putting.finish().await);
        assert!(text.ends_with(&format!("refuses the session: {told}")), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reasons_have_a_bounded_length() {
    let served = Served::new(false).await;
    let into = tempfile::tempdir().unwrap();
    let path = EntryPath(vec![vec![1; 250]; 12]);
    let getting = get(&served.address, vec![path], into.path(), RemoteSettings::default());
    let text = refused(getting.finish().await);
    assert!(text.len() < 2 * wire::REASON_LEN_MAX, "{} bytes", text.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_protocol_is_taken_for_one() {
    let place = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = place.local_addr().unwrap().to_string();
    let into = tempfile::tempdir().unwrap();
    let getting = get(&address, vec![EntryPath(Vec::new())], into.path(), RemoteSettings::default()).finish();
    let serving = async {
        let mut sockets = Vec::new();
        // The first connection may be one for data.
        loop {
            let (mut socket, _) = place.accept().await.unwrap();
            let _ = tokio::io::AsyncWriteExt::write_all(&mut socket, b"SSH-2.0-OpenSSH_9.6\r\n").await;
            sockets.push(socket);
        }
    };
    let text = tokio::select! {
        got = getting => refused(got),
        () = serving => unreachable!("it serves for ever"),
    };
    assert!(text.contains("something else seems to listen there"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn encryption_at_one_end_is_explained_at_both() {
    let security = Some(Security::shared_key([7; 32]));
    let settings = |encrypt| RemoteSettings { security: security.clone(), encrypt, ..RemoteSettings::default() };
    let (there, into) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = RemoteServer::builder(there.path()).settings(settings(true));
    let mut server = server.bind("127.0.0.1:0").await.unwrap();
    let address = server.local_address().to_owned();
    let getting = get(&address, vec![EntryPath(Vec::new())], into.path(), settings(false)).finish();
    let (got, ended) = tokio::join!(getting, server.next());
    let (at_client, at_server) = (refused(got), refused(ended.outcome));
    assert!(at_client.ends_with("it encrypts data, and this end does not: give --encrypt to both ends, or to neither"));
    assert_eq!(
        at_server,
        "this end encrypts data, and the other end does not: give --encrypt to both ends, or to neither"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn both_ends_learn_what_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a", b"bytes");
    let mut links = vec!["link".to_owned()];
    // More than one note holds.
    links.extend((0..2000).map(|number| format!("many/{number:0>200}")));
    std::fs::create_dir(dir.path().join("many")).unwrap();
    links.iter().for_each(|link| std::os::unix::fs::symlink("/nowhere", dir.path().join(link)).unwrap());
    let mut server = RemoteServer::builder(dir.path()).writable(true).bind("127.0.0.1:0").await.unwrap();
    let address = server.local_address().to_owned();
    let into = tempfile::tempdir().unwrap();
    let mut getting = get(&address, vec![EntryPath(Vec::new())], into.path(), RemoteSettings::default());
    let mut skipped = Vec::new();
    let got = async {
        while let Some(event) = getting.next().await {
            if let RemoteEvent::Skipped { path, reason } = event {
                assert!(reason.contains("symbolic link"), "{reason}");
                skipped.push(path);
            }
        }
        getting.outcome().unwrap().clone().unwrap()
    };
    let (got, ended) = tokio::join!(got, server.next());
    assert_eq!(skipped, links);
    for outcome in [got, ended.outcome.unwrap()] {
        assert_eq!((outcome.files, outcome.skipped), (1, 2001));
    }
    // The same of a put.
    let into = EntryPath(vec![b"many".to_vec()]);
    let putting = put(&address, vec![dir.path().to_owned()], into, RemoteSettings::default()).finish();
    let (put, ended) = tokio::join!(putting, server.next());
    assert_eq!((put.unwrap().skipped, ended.outcome.unwrap().skipped), (2001, 2001));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_to_store_says_why() {
    let served = Served::new(true).await;
    // The directory stands where a file is to be.
    served.write("model/there", b"");
    let from = tempfile::tempdir().unwrap();
    write(from.path(), "model", b"weights");
    let putting = put(&served.address, vec![from.path().join("model")], EntryPath(Vec::new()), Default::default());
    let problem = putting.finish().await.unwrap_err();
    let text = problem.to_string();
    assert!(matches!(problem, TransferError::Refused { .. }), "{problem:?}");
    assert!(text.contains("model") && !text.contains("sender"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_read_is_left_out_and_the_others_go_on() {
    let served = Served::new(false).await;
    served.write("a", b"first");
    served.write("b", b"second");
    served.write("c", b"third");
    let into = tempfile::tempdir().unwrap();
    let mut getting = served.get("", into.path());
    let mut skipped = Vec::new();
    while let Some(event) = getting.next().await {
        match event {
            // Nothing is read before the stream is polled on.
            RemoteEvent::Listed { .. } => std::fs::write(served.dir.path().join("c"), b"changed").unwrap(),
            RemoteEvent::Skipped { path, reason } => skipped.push((path, reason)),
            _ => {}
        }
    }
    let outcome = getting.outcome().unwrap().clone().unwrap();
    assert_eq!((outcome.files, outcome.skipped), (2, 1));
    assert_eq!(skipped.len(), 1);
    assert!(skipped[0].0 == "c" && skipped[0].1.starts_with("integrity error: c changed"), "{skipped:?}");
    assert_eq!(tree(into.path()).into_keys().collect::<Vec<_>>(), ["a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_cannot_choose_what_is_written() {
    let settings = RemoteSettings::default();
    let listener =
        rdmc_wan::SessionListener::bind(rdmc::TcpFabric::new(), "127.0.0.1:0", settings.session()).await.unwrap();
    let address = listener.local_address().to_owned();
    let source = tempfile::tempdir().unwrap();
    write(source.path(), ".bashrc", b"evil");
    let serving = async {
        let session = listener.accept().await.accept(Vec::new()).await.unwrap();
        let rdmc_wan::Session { sender, mut receiver, handle, .. } = session;
        let tree = crate::source::SourceTree::find(&[source.path().join(".bashrc")]).unwrap();
        let mut tally = Tally::unheard();
        producer::produce(tree, sender, &mut receiver, &handle, &mut tally).await.unwrap_err();
    };
    let into = tempfile::tempdir().unwrap();
    let asked = vec![EntryPath(vec![b"model.bin".to_vec()])];
    let getting = get(&address, asked, into.path(), RemoteSettings::default()).finish();
    let (got, ()) = tokio::join!(getting, serving);
    assert!(got.unwrap_err().to_string().contains("sends .bashrc, which was not asked for"));
    assert!(tree(into.path()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_cannot_give_endless_reasons() {
    let settings = RemoteSettings::default();
    let listener =
        rdmc_wan::SessionListener::bind(rdmc::TcpFabric::new(), "127.0.0.1:0", settings.session()).await.unwrap();
    let address = listener.local_address().to_owned();
    let serving = async {
        let session = listener.accept().await.accept(Vec::new()).await.unwrap();
        let rdmc_wan::Session { mut sender, mut receiver, .. } = session;
        let listed = crate::manifest::Manifest::of_sizes(&[5]).0.encode();
        producer::send_parts(&mut sender, &listed, |last| wire::Note::Manifest { last }).await.unwrap();
        let known = producer::receive_parts(&mut receiver, 1 << 20, |note| match note {
            wire::Note::Known { last } => Some(last),
            _ => None,
        });
        known.await.unwrap();
        let failed = wire::Item::Failed { file: 0, reason: "\u{1}".repeat(60 << 10) };
        let slab = sender.slab().await.unwrap();
        sender.send(slab, 0, wire::encode(&wire::Note::Items(vec![failed]))).await.unwrap();
        while let Ok(Some(_)) = receiver.next().await {}
    };
    let into = tempfile::tempdir().unwrap();
    let getting = get(&address, vec![EntryPath(Vec::new())], into.path(), RemoteSettings::default()).finish();
    let (got, ()) = tokio::join!(getting, serving);
    let text = refused(got);
    assert!(text.len() < 1000 && text.contains("the other end sends files"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_fetching_server_cannot_store_is_said_of_it() {
    let from = Served::new(false).await;
    from.write("model", b"weights");
    let to = Served::that(|server| server.writable(true).fetches_from(vec![from.address.clone()])).await;
    // A directory stands where a file is to be.
    to.write("model/there", b"");
    let location = RemoteLocation::parse(&to.address, 1).unwrap();
    let copying = copy(&from.address, vec![EntryPath(Vec::new())], &location, RemoteSettings::default());
    let problem = copying.finish().await.unwrap_err();
    assert!(matches!(problem, TransferError::Refused { .. }), "{problem:?}");
    let text = problem.to_string();
    assert!(text.contains(&format!("while fetching from {}", from.address)) && text.contains("model"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_inside_arrives_under_its_own_name_and_parts_are_hidden() {
    let served = Served::new(false).await;
    served.write("v42/model", b"weights");
    served.write("v42/.rdmc-partial/part", b"part");
    served.write(".rdmc-0123456789abcdef.part", b"stray");
    std::os::unix::fs::symlink("v42", served.dir.path().join("latest")).unwrap();
    let into = tempfile::tempdir().unwrap();
    served.get("latest", into.path()).finish().await.unwrap();
    assert_eq!(tree(into.path()).into_keys().collect::<Vec<_>>(), ["latest/model"]);
    served.get("", into.path()).finish().await.unwrap();
    assert_eq!(tree(into.path()).into_keys().collect::<Vec<_>>(), ["latest/model", "v42/model"]);
    for hidden in ["v42/.rdmc-partial", ".rdmc-0123456789abcdef.part"] {
        served.get(hidden, into.path()).finish().await.unwrap_err();
    }
}

#[test]
fn locations_are_read() {
    let parsed = |text| RemoteLocation::parse(text, 7473).map(|location| location.to_string());
    assert_eq!(parsed("host").unwrap(), "host:7473/");
    assert_eq!(parsed("host:1/a//b/").unwrap(), "host:1/a/b");
    assert_eq!(parsed("[::1]/a").unwrap(), "[::1]:7473/a");
    assert_eq!(parsed("[::1]:9/a").unwrap(), "[::1]:9/a");
    for wrong in ["", ":7/a", "/a", "host:x/a", "host:0/a", "::1/a"] {
        assert!(parsed(wrong).is_err(), "{wrong}");
    }
}
