//! Frames on control connections: a length, a value, and a check value.
//!
//! A frame is the length of its value in bytes (u32, little endian), the value, and a [check value](FrameCheck) (u32,
//! little endian). What the values mean, and how long they may be, is the protocol's business.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a length.
pub const PREFIX_LEN: usize = 4;
/// Bytes of a check value.
pub const CHECK_LEN: usize = 4;

/// The CRC-32 of all frames of one direction so far, which finds frames that were changed, lost or repeated on the way.
///
/// Each frame of the handshake is checked by itself; then a direction begins anew.
#[derive(Debug, Default)]
pub struct FrameCheck(u32);

impl FrameCheck {
    /// Appends the check value to a frame that has none.
    pub fn seal(&mut self, frame: &mut Vec<u8>) {
        let value = self.next(&[frame]);
        frame.extend(value.to_le_bytes());
    }

    fn next(&mut self, frame: &[&[u8]]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.0);
        frame.iter().for_each(|part| hasher.update(part));
        self.0 = hasher.finalize();
        self.0
    }
}

/// A frame was changed on the way, or one before it was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame was changed or lost on the way: its check value is {got:08x} instead of {want:08x}")]
pub struct CorruptFrame {
    /// The check value that came with it.
    pub got: u32,
    /// The check value of its bytes.
    pub want: u32,
}

/// Writes the length of its value into the first bytes of a frame.
///
/// # Panics
/// If the frame is shorter than a length, or its value longer than 4 GiB.
pub fn set_len(frame: &mut [u8]) {
    let len = u32::try_from(frame.len() - PREFIX_LEN).expect("the caller keeps values below 4 GiB");
    frame[..PREFIX_LEN].copy_from_slice(&len.to_le_bytes());
}

/// Returns the length of a value, in bytes.
pub fn len_of(prefix: [u8; PREFIX_LEN]) -> usize {
    u32::from_le_bytes(prefix) as usize
}

/// Reads the length of a frame; `None` if the stream ended before it.
///
/// # Cancel safety
/// If the future is dropped, bytes are lost: drop the stream, too.
///
/// # Errors
/// The stream's.
pub async fn read_prefix(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<[u8; PREFIX_LEN]>> {
    let mut prefix = [0; PREFIX_LEN];
    let first = stream.read(&mut prefix).await?;
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut prefix[first..]).await?;
    Ok(Some(prefix))
}

/// Reads the value that follows its length, which the caller has checked. Memory is taken only as bytes arrive.
///
/// # Cancel safety
/// If the future is dropped, bytes are lost: drop the stream, too.
///
/// # Errors
/// The stream's.
pub async fn read_value(stream: &mut (impl AsyncRead + Unpin), prefix: [u8; PREFIX_LEN]) -> io::Result<Vec<u8>> {
    let len = len_of(prefix);
    let mut value = Vec::new();
    let got = (&mut *stream).take(len as u64).read_to_end(&mut value).await?;
    if got < len { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(value) }
}

/// Reads the check value that follows a value, and compares it.
///
/// # Cancel safety
/// If the future is dropped, bytes are lost: drop the stream, too.
///
/// # Errors
/// The stream's; [`CorruptFrame`], of the kind `InvalidData`.
pub async fn verify(
    stream: &mut (impl AsyncRead + Unpin),
    prefix: &[u8],
    value: &[u8],
    check: &mut FrameCheck,
) -> io::Result<()> {
    let mut got = [0; CHECK_LEN];
    stream.read_exact(&mut got).await?;
    let (got, want) = (u32::from_le_bytes(got), check.next(&[prefix, value]));
    if got == want { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidData, CorruptFrame { got, want })) }
}
