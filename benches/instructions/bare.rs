//! Moves blocks at the lowest cost: a task at either end, with nothing but Tokio's sockets.

use anyhow::{Result, ensure};
use bytes::{Buf, Bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Two connected sockets.
pub(crate) struct Pair {
    root: TcpStream,
    receiver: TcpStream,
    place: Vec<u8>,
}

impl Pair {
    pub(crate) async fn connect(place_bytes: usize) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (root, accepted) = futures::try_join!(TcpStream::connect(listener.local_addr()?), listener.accept())?;
        root.set_nodelay(true)?;
        accepted.0.set_nodelay(true)?;
        Ok(Self { root, receiver: accepted.0, place: vec![0; place_bytes] })
    }

    /// Moves a message in blocks. Each has a header, and leaves when the receiver has granted it.
    pub(crate) async fn send(self, message: Bytes, block_bytes: usize) -> Result<Self> {
        let len = message.len();
        let sent = tokio::spawn(send(self.root, message, block_bytes));
        let received = tokio::spawn(receive(self.receiver, self.place, len, block_bytes));
        let (root, (receiver, place)) = futures::try_join!(async { sent.await? }, async { received.await? })?;
        Ok(Self { root, receiver, place })
    }
}

async fn send(mut stream: TcpStream, message: Bytes, block_bytes: usize) -> Result<TcpStream> {
    let (mut room, mut grants) = (0, [0; GRANTED]);
    for (number, block) in message.chunks(block_bytes).enumerate() {
        while room == 0 {
            room = stream.read(&mut grants).await?;
            ensure!(room > 0, "the receiver is gone");
        }
        room -= 1;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&(number as u64).to_le_bytes());
        header[8..].copy_from_slice(&(block.len() as u64).to_le_bytes());
        stream.write_all_buf(&mut Buf::chain(&header[..], block)).await?;
    }
    Ok(stream)
}

async fn receive(
    mut stream: TcpStream,
    mut place: Vec<u8>,
    len: usize,
    block_bytes: usize,
) -> Result<(TcpStream, Vec<u8>)> {
    let mut not_granted = len.div_ceil(block_bytes);
    let first = not_granted.min(GRANTED);
    stream.write_all(&[1; GRANTED][..first]).await?;
    not_granted -= first;
    for block in place[..len].chunks_mut(block_bytes) {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header).await?;
        stream.read_exact(block).await?;
        if not_granted > 0 {
            stream.write_all(&[1]).await?;
            not_granted -= 1;
        }
    }
    Ok((stream, place))
}

/// Length of a header in bytes: a number and a length.
const HEADER: usize = 16;
/// Blocks that are granted ahead.
const GRANTED: usize = 16;
