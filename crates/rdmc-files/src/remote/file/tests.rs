use std::io::{ErrorKind, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use futures::FutureExt;
use rdmc_wan::conformance::Cut;
use rdmc_wan::{Session, SessionError, SessionListener};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};

use super::wire::{FileBytes, FileCommand};
use super::*;
use crate::manifest::EntryPath;
use crate::remote::tests::{Served, content};
use crate::remote::wire::{Opening, encode};
use crate::remote::{RemoteServer, ServedTransfer};

/// How long a server may take that is to end a session.
const WATCHDOG: Duration = Duration::from_secs(60);

const _: fn() = || {
    fn is_shared<T: Send + Sync + Unpin>() {}
    is_shared::<RemoteFile>();
};

fn location(address: &str, path: &str) -> RemoteLocation {
    RemoteLocation::parse(&format!("{address}/{path}"), 1).unwrap()
}

async fn open(address: &str, path: &str, options: RemoteFileOptions) -> io::Result<RemoteFile> {
    options.open(&location(address, path), &RemoteSettings::default()).await
}

/// Opens a file for reading. Nothing comes before the first read.
async fn lazily(address: &str, path: &str) -> RemoteFile {
    open(address, path, RemoteFile::options().read(true)).await.unwrap()
}

/// Opens a file for reading. The beginning comes at once.
async fn eagerly(address: &str, path: &str) -> RemoteFile {
    RemoteFile::open(&location(address, path), &RemoteSettings::default()).await.unwrap()
}

async fn read_whole(file: &mut RemoteFile) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).await.unwrap();
    bytes
}

/// Reads until the memory is full, or the file ends.
async fn read_upto(file: &mut RemoteFile, len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.take(len as u64).read_to_end(&mut bytes).await.unwrap();
    bytes
}

/// Draws numbers. A failure shows the seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }

    /// Draws a length: many are short.
    fn len(&mut self) -> usize {
        let bound = [10, 5_000, 40_000, 300_000, 2_500_000][self.below(5)];
        self.below(bound)
    }

    /// Seeks to a place in a file of `len` bytes, or a little behind it, and returns it.
    async fn seek(&mut self, file: &mut RemoteFile, len: usize) -> usize {
        let to = self.below(len + len / 10 + 10);
        let here = file.stream_position().await.unwrap();
        let by = |from: u64| to as i64 - from as i64;
        let seek = [SeekFrom::Start(to as u64), SeekFrom::Current(by(here)), SeekFrom::End(by(len as u64))];
        assert_eq!(file.seek(seek[self.below(3)]).await.unwrap(), to as u64);
        to
    }
}

/// A server that tells what it has served.
async fn server_of(dir: &Path, writable: bool) -> (RemoteServer, String) {
    let server = RemoteServer::builder(dir).writable(writable).bind("127.0.0.1:0").await.unwrap();
    let address = server.local_address().to_owned();
    (server, address)
}

/// Does something while a server runs, and returns what the server has ended then.
async fn ended_by(mut server: RemoteServer, doing: impl Future<Output = ()>) -> ServedTransfer {
    let (ended, ()) = tokio::join!(server.next(), doing);
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_read_from_the_beginning_to_the_end() {
    let served = Served::new(false).await;
    for len in [0, 1, 16 << 10, 1 << 20, 4 << 20, 21_300_007] {
        let bytes = content(len as u64, len);
        served.write("dir/file", &bytes);
        let there = std::fs::OpenOptions::new().write(true).open(served.dir.path().join("dir/file")).unwrap();
        there.set_modified(SystemTime::UNIX_EPOCH - Duration::new(100, 5)).unwrap();
        for mut file in [eagerly(&served.address, "dir/file").await, lazily(&served.address, "dir/file").await] {
            let found = there.metadata().unwrap();
            let metadata = file.metadata();
            assert_eq!((metadata.len(), metadata.mode()), (len as u64, found.mode()));
            assert_eq!(metadata.modified(), found.modified().ok());
            assert!(read_whole(&mut file).await == bytes, "{len}");
            file.close().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_at_random_places_see_the_file() {
    let served = Served::new(false).await;
    let bytes = content(3, 9_000_000);
    served.write("file", &bytes);
    let mut file = lazily(&served.address, "file").await;
    let mut draws = Draws(0x5EED_0001);
    for round in 0..150 {
        let at = draws.seek(&mut file, bytes.len()).await;
        // Sometimes the read is given up and another one goes on.
        if draws.below(4) == 0 {
            let _ = file.read_u8().now_or_never();
            file.seek(SeekFrom::Start(at as u64)).await.unwrap();
        }
        let len = draws.len();
        let at = at.min(bytes.len());
        let there = &bytes[at..bytes.len().min(at + len)];
        assert!(read_upto(&mut file, len).await == there, "round {round}: {len} bytes at {at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_and_writes_at_random_places_are_those_of_a_file_in_memory() {
    let served = Served::new(true).await;
    // In a short file, most operations meet what others have left.
    for (seed, len) in [(0x5EED_0002, 3_000_000), (0x5EED_0003, 60_000)] {
        served.write("file", &content(seed, len));
        let mut file = open(&served.address, "file", RemoteFile::options().read(true).write(true)).await.unwrap();
        behave_as_in_memory(&mut file, &served.dir.path().join("file"), Draws(seed)).await;
    }
}

async fn behave_as_in_memory(file: &mut RemoteFile, there: &Path, mut draws: Draws) {
    let (mut model, mut at) = (std::fs::read(there).unwrap(), 0);
    let longest = model.len();
    for round in 0..150 {
        if draws.below(3) > 0 {
            at = draws.seek(file, model.len()).await;
        }
        let len = draws.len().min(longest);
        match draws.below(8) {
            0..=3 => {
                let bytes = content(round, len);
                file.write_all(&bytes).await.unwrap();
                // A write without bytes makes no file longer.
                if len > 0 {
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&bytes);
                }
                at += len;
            }
            4..=6 => {
                let expected = &model[at.min(model.len())..model.len().min(at + len)];
                assert!(read_upto(file, len).await == expected, "round {round}: {len} bytes at {at}");
                at += expected.len();
            }
            _ => {
                file.flush().await.unwrap();
                // Others see it.
                assert!(std::fs::read(there).unwrap() == model, "round {round}");
            }
        }
        assert_eq!(file.metadata().len(), model.len() as u64, "round {round}");
    }
    file.shutdown().await.unwrap();
    assert!(std::fs::read(there).unwrap() == model);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_made_and_written_past_its_end() {
    let served = Served::new(true).await;
    let mut file = RemoteFile::create(&location(&served.address, "new"), &RemoteSettings::default()).await.unwrap();
    file.write_all(b"begin").await.unwrap();
    file.seek(SeekFrom::Current(3 << 20)).await.unwrap();
    file.write_all(b"end").await.unwrap();
    file.sync_all().await.unwrap();
    let hole = vec![0; 3 << 20];
    let there = served.dir.path().join("new");
    assert!(std::fs::read(&there).unwrap() == [&b"begin"[..], &hole, b"end"].concat());
    assert_eq!(file.metadata().modified(), std::fs::metadata(&there).unwrap().modified().ok());
    file.close().await.unwrap();
    // It loses its bytes when it is made again, and not when it is opened.
    let kept = open(&served.address, "new", RemoteFile::options().write(true).create(true)).await.unwrap();
    assert_eq!(kept.metadata().len(), (3 << 20) + 8);
    let emptied = RemoteFile::create(&location(&served.address, "new"), &RemoteSettings::default()).await.unwrap();
    assert_eq!((emptied.metadata().len(), std::fs::metadata(&there).unwrap().len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_read_one_file_at_once() {
    let served = Served::new(false).await;
    let bytes = content(5, 12_000_000);
    served.write("file", &bytes);
    let (mut one, mut other) = (eagerly(&served.address, "file").await, eagerly(&served.address, "file").await);
    other.seek(SeekFrom::Start(5_000_000)).await.unwrap();
    let (first, second) = tokio::join!(read_whole(&mut one), read_whole(&mut other));
    assert!(first == bytes && second == bytes[5_000_000..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_opened_gives_the_kind_of_the_error() {
    let (served, readable) = (Served::new(true).await, Served::new(false).await);
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), b"secret").unwrap();
    for place in [&served, &readable] {
        place.write("dir/file", b"bytes");
        place.write(".rdmc-partial/part", b"part");
        symlink(outside.path().join("secret"), place.dir.path().join("link")).unwrap();
        symlink("dir/file", place.dir.path().join("inside")).unwrap();
        symlink("nowhere", place.dir.path().join("dangling")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(place.dir.path().join("pipe")).status();
        assert!(made.unwrap().success());
    }
    let (read, write) = (RemoteFile::options().read(true), RemoteFile::options().write(true));
    let both = read.write(true);
    for (place, path, options, kind) in [
        (&served, "none", read, ErrorKind::NotFound),
        (&served, "none", write, ErrorKind::NotFound),
        (&served, "none/file", write.create(true), ErrorKind::NotFound),
        (&served, "dir/file/file", read, ErrorKind::NotADirectory),
        (&served, "dir", read, ErrorKind::IsADirectory),
        (&served, "", read, ErrorKind::IsADirectory),
        (&served, "dir", write.create(true), ErrorKind::IsADirectory),
        (&served, "", write.create(true), ErrorKind::IsADirectory),
        (&served, "pipe", read, ErrorKind::InvalidInput),
        (&served, "link", read, ErrorKind::PermissionDenied),
        (&served, "link", both.truncate(true), ErrorKind::PermissionDenied),
        (&served, "dangling", write.create(true), ErrorKind::Other),
        (&served, "dir/file", write.create_new(true), ErrorKind::AlreadyExists),
        (&served, ".rdmc-partial/part", read, ErrorKind::NotFound),
        (&served, ".rdmc-0123456789abcdef.part", write.create(true), ErrorKind::PermissionDenied),
        (&served, "dir/file", RemoteFile::options(), ErrorKind::InvalidInput),
        (&served, "dir/file", read.create(true), ErrorKind::InvalidInput),
        (&served, "dir/file", read.read_from(u64::MAX), ErrorKind::InvalidInput),
        (&readable, "dir/file", write, ErrorKind::PermissionDenied),
        (&readable, "new", both.create(true), ErrorKind::PermissionDenied),
    ] {
        let error = open(&place.address, path, options).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{path} {options:?}: {error}");
    }
    let error = open(&readable.address, "dir/file", write).await.unwrap_err().to_string();
    assert!(error.contains("dir/file: this server takes no files") && error.contains("--writable"), "{error}");
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"secret");
    assert!(!served.dir.path().join("nowhere").exists() && !readable.dir.path().join("new").exists());
    assert_eq!(read_whole(&mut open(&served.address, "inside", read).await.unwrap()).await, b"bytes");
    // A client that does not check its paths.
    let up = RemoteLocation { address: served.address.clone(), path: EntryPath(vec![b"..".to_vec(), b"x".to_vec()]) };
    let error = read.open(&up, &RemoteSettings::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_keeps_its_files_takes_only_new_ones() {
    let settings = RemoteSettings { overwrite: false, ..RemoteSettings::default() };
    let served = Served::that(|server| server.writable(true).settings(settings)).await;
    served.write("old", b"old");
    let write = RemoteFile::options().write(true);
    for (options, kind) in [
        (write, ErrorKind::PermissionDenied),
        (write.truncate(true), ErrorKind::PermissionDenied),
        (write.create(true).truncate(true), ErrorKind::AlreadyExists),
    ] {
        assert_eq!(open(&served.address, "old", options).await.unwrap_err().kind(), kind, "{options:?}");
    }
    assert_eq!(std::fs::read(served.dir.path().join("old")).unwrap(), b"old");
    let mut new = open(&served.address, "new", write.create(true)).await.unwrap();
    new.write_all(b"new").await.unwrap();
    new.close().await.unwrap();
    assert_eq!(std::fs::read(served.dir.path().join("new")).unwrap(), b"new");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_file_is_not_open_for_is_refused_here_and_it_goes_on() {
    let served = Served::new(true).await;
    served.write("file", b"bytes");
    let mut reader = lazily(&served.address, "file").await;
    assert_eq!(reader.write(b"x").await.unwrap_err().kind(), ErrorKind::PermissionDenied);
    for wrong in [SeekFrom::Current(-1), SeekFrom::End(-6), SeekFrom::Start(OFFSET_MAX + 1), SeekFrom::End(i64::MAX)] {
        assert_eq!(reader.seek(wrong).await.unwrap_err().kind(), ErrorKind::InvalidInput, "{wrong:?}");
    }
    assert_eq!(read_whole(&mut reader).await, b"bytes");
    reader.seek(SeekFrom::Start(OFFSET_MAX)).await.unwrap();
    assert_eq!(read_whole(&mut reader).await, b"");
    reader.sync_all().await.unwrap();
    reader.shutdown().await.unwrap();
    reader.shutdown().await.unwrap();
    for error in [reader.read(&mut [0]).await.map(drop), reader.sync_all().await] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
    for start in [OFFSET_MAX - 1, OFFSET_MAX] {
        let options = RemoteFile::options().read(true).read_from(start);
        let mut beyond = open(&served.address, "file", options).await.unwrap();
        assert_eq!(read_whole(&mut beyond).await, b"");
    }
    let mut writer = open(&served.address, "file", RemoteFile::options().write(true)).await.unwrap();
    assert_eq!(writer.read(&mut [0]).await.unwrap_err().kind(), ErrorKind::PermissionDenied);
    writer.seek(SeekFrom::Start(OFFSET_MAX)).await.unwrap();
    assert_eq!(writer.write(b"x").await.unwrap_err().kind(), ErrorKind::FileTooLarge);
    writer.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_the_server_cannot_do_fails_as_it_fails_there() {
    let served = Served::new(true).await;
    // The file system decides whether a file may be so long.
    let there = std::fs::File::create(served.dir.path().join("there")).unwrap();
    let expected = there.write_all_at(b"x", OFFSET_MAX - 1).map_err(|error| error.kind());
    let mut file = RemoteFile::create(&location(&served.address, "file"), &RemoteSettings::default()).await.unwrap();
    file.seek(SeekFrom::Start(OFFSET_MAX - 1)).await.unwrap();
    file.write_all(b"x").await.unwrap();
    let flushed = file.flush().await;
    assert_eq!(flushed.as_ref().map_err(io::Error::kind).copied(), expected, "{flushed:?}");
    if let Err(error) = flushed {
        assert!(error.to_string().contains("/file: "), "{error}");
        // The file has ended by it.
        assert_eq!(file.write(b"x").await.unwrap_err().to_string(), error.to_string());
        assert_eq!(file.shutdown().await.unwrap_err().kind(), error.kind());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_truncated_while_it_is_read_ends_early_and_may_grow_again() {
    let served = Served::new(false).await;
    let bytes = content(6, 3_000_000);
    served.write("file", &bytes);
    let mut file = lazily(&served.address, "file").await;
    // So little is asked for that the rest is read later.
    assert!(read_upto(&mut file, 1000).await == bytes[..1000]);
    let there = std::fs::OpenOptions::new().write(true).open(served.dir.path().join("file")).unwrap();
    there.set_len(500_000).unwrap();
    assert!(read_whole(&mut file).await == bytes[1000..500_000]);
    there.write_all_at(b"more", 500_000).unwrap();
    assert_eq!(read_whole(&mut file).await, b"more");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_was_found_is_not_believed_later() {
    let served = Served::new(false).await;
    let mut bytes = content(13, 100_000);
    served.write("file", &bytes);
    let options = RemoteFile::options().read(true).read_from(95_000);
    let mut file = open(&served.address, "file", options).await.unwrap();
    file.read_u8().await.unwrap();
    bytes.extend_from_slice(b"more");
    served.write("file", &bytes);
    // The first bytes that come from here end where the file has ended.
    let start = 100_000 - (16 << 10);
    file.seek(SeekFrom::Start(start as u64)).await.unwrap();
    assert!(read_whole(&mut file).await == bytes[start..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_read_and_written_on_over_another_connection() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected = content(7, 20_000_000);
    std::fs::write(dir.path().join("file"), &expected).unwrap();
    let (server, address) = server_of(dir.path(), true).await;
    let cut = Cut::before(&address).await;
    let using = async {
        let mut file = open(&cut.address, "file", RemoteFile::options().read(true).write(true)).await.unwrap();
        let mut bytes = vec![0; expected.len()];
        for piece in bytes.chunks_mut(5_000_000) {
            file.read_exact(piece).await.unwrap();
            cut.cut();
        }
        assert!(bytes == expected);
        file.rewind().await.unwrap();
        for piece in bytes.chunks_mut(5_000_000) {
            piece.reverse();
            file.write_all(piece).await.unwrap();
            cut.cut();
        }
        file.close().await.unwrap();
        expected = bytes;
    };
    let ended = ended_by(server, using).await;
    assert!(ended.outcome.unwrap().resumed >= 2);
    assert!(std::fs::read(dir.path().join("file")).unwrap() == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_moves_that_is_not_read_and_little_that_is_read_here_and_there() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(8, 30_000_000);
    std::fs::write(dir.path().join("file"), &bytes).unwrap();
    for (reads, most) in [(0, 0), (5, 5 * (16 << 10))] {
        let (server, address) = server_of(dir.path(), false).await;
        let using = async {
            let mut file = lazily(&address, "file").await;
            for read in (1..=reads).rev() {
                let at = read * 5_000_000;
                file.seek(SeekFrom::Start(at as u64)).await.unwrap();
                assert!(read_upto(&mut file, 4096).await == bytes[at..at + 4096]);
            }
            file.close().await.unwrap();
        };
        let ended = ended_by(server, using).await;
        assert_eq!(ended.request, "read /file");
        let outcome = ended.outcome.unwrap();
        assert_eq!((outcome.files, outcome.bytes, outcome.moved), (1, 30_000_000, most), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_seek_forward_asks_for_nothing_again() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(9, 4 << 20);
    std::fs::write(dir.path().join("file"), &bytes).unwrap();
    let (server, address) = server_of(dir.path(), false).await;
    let using = async {
        let mut file = eagerly(&address, "file").await;
        for at in [0, 10, 5, 900_000, 1_500_000, 1_048_576, 4_000_000] {
            file.seek(SeekFrom::Start(at as u64)).await.unwrap();
            assert!(read_upto(&mut file, 4096).await == bytes[at..at + 4096], "{at}");
        }
        assert!(read_whole(&mut file).await == bytes[4_004_096..]);
        file.close().await.unwrap();
    };
    assert_eq!(ended_by(server, using).await.outcome.unwrap().moved, 4 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_dropped_anywhere_has_closed_the_file() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::File::create(dir.path().join("file")).unwrap().set_len(300 << 20).unwrap();
    for reads in [0, 1, 5_000_000] {
        let (server, address) = server_of(dir.path(), false).await;
        let using = async {
            let mut file = eagerly(&address, "file").await;
            file.read_exact(&mut vec![0; reads]).await.unwrap();
            // A read that is under way.
            file.seek(SeekFrom::Start(200 << 20)).await.unwrap();
            let _ = file.read_u8().now_or_never();
        };
        let outcome = ended_by(server, using).await.outcome.unwrap();
        assert!(outcome.files == 1 && outcome.moved < 300 << 20, "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_is_dropped_has_closed_the_file_only_if_it_was_flushed() {
    let dir = tempfile::tempdir().unwrap();
    for flushes in [true, false] {
        let (server, address) = server_of(dir.path(), true).await;
        let using = async {
            let target = location(&address, "file");
            let mut file = RemoteFile::create(&target, &RemoteSettings::default()).await.unwrap();
            file.write_all(b"bytes").await.unwrap();
            if flushes {
                file.flush().await.unwrap();
            }
        };
        let ended = ended_by(server, using).await;
        assert_eq!((ended.request.as_str(), ended.outcome.is_ok()), ("write /file", flushes), "{:?}", ended.outcome);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_stopped_says_so_to_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), content(11, 50_000_000)).unwrap();
    let (mut server, address) = server_of(dir.path(), false).await;
    let mut file = tokio::select! {
        file = eagerly(&address, "file") => file,
        ended = server.next() => panic!("{ended:?}"),
    };
    let (error, ()) = tokio::join!(async { file.read_to_end(&mut Vec::new()).await.unwrap_err() }, server.close());
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
    assert!(error.to_string().contains("the server was stopped"), "{error}");
}

/// Opens a file as a client that keeps to nothing, and sends commands. Returns why the server ends the session.
async fn misuse(address: &str, how: OpenHow, commands: &[Vec<u8>]) -> String {
    let settings = RemoteSettings::default();
    let request = Request::Open { path: EntryPath(vec![b"file".to_vec()]), how };
    let opening = Opening::encode(request);
    let session = rdmc_wan::connect(rdmc::TcpFabric::new(), address, settings.session(), opening).await.unwrap();
    let Session { mut sender, receiver: _receiver, handle, .. } = session;
    for command in commands {
        let Ok(mut slab) = sender.slab().await else { break };
        slab[..3].copy_from_slice(b"abc");
        let _ = sender.send(slab, 3, command.clone()).await;
    }
    match tokio::time::timeout(WATCHDOG, handle.ended()).await.expect("the server ends the session") {
        Err(SessionError::Aborted { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_break_the_protocol_end_the_session() {
    let served = Served::new(true).await;
    let bytes = content(12, 10_000);
    served.write("file", &bytes);
    let reads = OpenHow { read: true, ..OpenHow::default() };
    let writes = OpenHow { write: true, ..OpenHow::default() };
    let read = |stream, start, end| encode(&FileCommand::Read { stream, range: ReadRange { start, end } });
    let read_on = |end| encode(&FileCommand::ReadOn { end });
    let write = |offset| encode(&FileCommand::Write { offset });
    for (how, commands, reason) in [
        (reads, vec![read(0, 0, 1)], "streams out of order"),
        (reads, vec![read(2, 0, 1)], "streams out of order"),
        (reads, vec![read(1, 0, 1), read(1, 0, 1)], "streams out of order"),
        (reads, vec![read(u64::MAX, 0, 1)], "streams out of order"),
        (reads, vec![read(1, 1, 0)], "offsets in a file"),
        (reads, vec![read(1, u64::MAX, u64::MAX)], "offsets in a file"),
        (reads, vec![read(1, 0, OFFSET_MAX + 1)], "offsets in a file"),
        (reads, vec![read(1, 10, 20), read_on(19)], "offsets in a file"),
        (reads, vec![read(1, 10, 20), read_on(u64::MAX)], "offsets in a file"),
        (reads, vec![write(0)], "not opened for writing"),
        (writes, vec![read(1, 0, 1)], "not opened for reading"),
        (writes, vec![write(u64::MAX)], "offsets in a file"),
        (writes, vec![write(OFFSET_MAX - 2)], "offsets in a file"),
        (writes, vec![vec![0xff; 9]], "sends something else"),
    ] {
        let said = misuse(&served.address, how, &commands).await;
        assert!(said.contains(reason), "{commands:?}: {said}");
    }
    assert!(std::fs::read(served.dir.path().join("file")).unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_breaks_the_protocol_gives_no_bytes() {
    let note = |stream, last| encode(&FileBytes { stream, last });
    for (slabs, reason) in [
        (vec![(4 << 10, note(0, false)), ((16 << 10) + 1, note(1, false))], "not asked for"),
        (vec![(10, note(2, false))], "not asked for"),
        (vec![(0, note(1, false))], "without bytes"),
        (vec![(1, vec![0xff; 9])], "something else"),
    ] {
        let settings = RemoteSettings::default();
        let listener = SessionListener::bind(rdmc::TcpFabric::new(), "127.0.0.1:0", settings.session()).await.unwrap();
        let address = listener.local_address().to_owned();
        let serving = async {
            let metadata = RemoteFileMetadata { len: u64::MAX, mode: 0, mtime_s: i64::MAX, mtime_ns: u32::MAX };
            let request = listener.accept().await;
            let Session { mut sender, mut receiver, .. } = request.accept(encode(&Opened::Ok(metadata))).await.unwrap();
            receiver.next().await.unwrap().unwrap();
            for (len, note) in slabs {
                let slab = sender.slab().await.unwrap();
                sender.send(slab, len, note).await.unwrap();
            }
            receiver.next().await.unwrap_err()
        };
        let reading = async {
            let mut file = lazily(&address, "file").await;
            assert_eq!(file.metadata().modified(), None);
            let error = file.seek(SeekFrom::End(0)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            file.read(&mut [0; 10]).await.unwrap_err()
        };
        let (told, error) = tokio::join!(serving, reading);
        assert!(error.kind() == ErrorKind::InvalidData && error.to_string().contains(reason), "{error}");
        assert!(told.to_string().contains(reason), "{told}");
    }
}
