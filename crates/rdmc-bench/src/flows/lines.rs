//! Lines of JSON between the processes of flows.

use anyhow::{Context, anyhow, ensure};
use rdmc_files::words::printable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Writes what a process must know.
pub(super) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it has string keys")
}

/// Writes a line.
pub(super) async fn write(to: &mut (impl AsyncWrite + Unpin), value: &impl Serialize) -> anyhow::Result<()> {
    let line = to_json(value) + "\n";
    to.write_all(line.as_bytes()).await?;
    Ok(to.flush().await?)
}

/// Reads a line; `None` if the stream ended before it.
pub(super) async fn read<T: DeserializeOwned>(from: &mut (impl AsyncBufRead + Unpin)) -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    let got = from.take(LINE_MAX).read_line(&mut line).await.context("what the other end says")?;
    if got == 0 {
        return Ok(None);
    }
    ensure!(line.ends_with('\n'), "the other end says more than {LINE_MAX} bytes, or was cut off: it is no rdmc");
    // It repeats what the other end says.
    let said = serde_json::from_str(&line).map_err(|error| anyhow!("{}", printable(&error.to_string())));
    Ok(Some(said.context("the other end is no rdmc of this version")?))
}

/// Reads a line that must come.
pub(super) async fn expect<T: DeserializeOwned>(from: &mut (impl AsyncBufRead + Unpin)) -> anyhow::Result<T> {
    read(from).await?.context("the other end closed the connection")
}

/// Longest line in bytes.
const LINE_MAX: u64 = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_is_bounded_and_whole() {
        let mut written = Vec::new();
        write(&mut written, &(1, "two")).await.unwrap();
        let mut from = &written[..];
        assert_eq!(read(&mut from).await.unwrap(), Some((1, "two".to_owned())));
        assert_eq!(read::<(u32, String)>(&mut from).await.unwrap(), None);
        assert!(expect::<u32>(&mut from).await.is_err());
        let long = [b'1'; 10_000];
        for (bytes, says) in [
            (&long[..], "8192 bytes"),
            (b"17", "cut off"),
            (b"{\n", "no rdmc of this version"),
            (b"\"\\u001b\"\n", "no rdmc"),
        ] {
            let mut from = bytes;
            let error = read::<u64>(&mut from).await.unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(says) && !error.contains('\u{1b}'), "{error}");
        }
    }
}
