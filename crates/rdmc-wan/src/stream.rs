//! Byte streams over slabs.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll, ready};

use futures::future::BoxFuture;
use rdmc_fabric::Buffer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::session::{SessionError, Slab, SlabMut, SlabReceiver, SlabSender};

/// Writes bytes into slabs. A slab is sent when it is full, or when the writer is flushed.
///
/// [Shutting it down](tokio::io::AsyncWriteExt::shutdown) ends the direction, and waits until the other end has all
/// bytes. If it is dropped before, the session fails.
pub struct SlabWriter {
    state: Mutex<Writing>,
}

/// The sender is always in one of these.
enum Writing {
    Idle(SlabSender),
    Filling(SlabSender, SlabMut, usize),
    Waiting(BoxFuture<'static, Result<(SlabSender, Option<SlabMut>), SessionError>>),
    Ending(BoxFuture<'static, Result<(), SessionError>>),
    Ended,
    Failed,
}

impl SlabWriter {
    /// Writes into slabs of `sender`.
    pub fn new(sender: SlabSender) -> Self {
        Self { state: Mutex::new(Writing::Idle(sender)) }
    }

    fn state(&mut self) -> &mut Writing {
        self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Drives what is under way; ready when the sender is here again.
    fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let state = self.state();
        let Writing::Waiting(future) = state else { return Poll::Ready(Ok(())) };
        *state = match ready!(future.as_mut().poll(cx)) {
            Ok((sender, Some(slab))) => Writing::Filling(sender, slab, 0),
            Ok((sender, None)) => Writing::Idle(sender),
            Err(error) => {
                *state = Writing::Failed;
                return Poll::Ready(Err(error.into()));
            }
        };
        Poll::Ready(Ok(()))
    }

    /// Sends a slab that has bytes.
    fn send_filled(&mut self) {
        let state = self.state();
        *state = match std::mem::replace(state, Writing::Ended) {
            Writing::Filling(mut sender, slab, len) if len > 0 => Writing::Waiting(Box::pin(async move {
                sender.send(slab, len, Vec::new()).await?;
                Ok((sender, None))
            })),
            other => other,
        };
    }
}

impl AsyncWrite for SlabWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        loop {
            ready!(self.poll_settled(cx))?;
            let state = self.state();
            *state = match std::mem::replace(state, Writing::Ended) {
                Writing::Idle(sender) => Writing::Waiting(Box::pin(async move {
                    let slab = sender.slab().await?;
                    Ok((sender, Some(slab)))
                })),
                Writing::Filling(sender, mut slab, len) => {
                    let now = bytes.len().min(slab.len() - len);
                    slab[len..len + now].copy_from_slice(&bytes[..now]);
                    let full = len + now == slab.len();
                    *state = Writing::Filling(sender, slab, len + now);
                    if full {
                        self.send_filled();
                    }
                    return Poll::Ready(Ok(now));
                }
                other => {
                    *state = other;
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
            };
        }
    }

    /// Announces what was written; does not wait until the other end has taken it.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_settled(cx))?;
        self.send_filled();
        self.poll_settled(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.as_mut().poll_flush(cx))?;
            let state = self.state();
            match std::mem::replace(state, Writing::Ended) {
                Writing::Idle(sender) | Writing::Filling(sender, ..) => {
                    *state = Writing::Ending(Box::pin(sender.finish()));
                }
                Writing::Ending(mut future) => match future.as_mut().poll(cx) {
                    Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                    Poll::Ready(Err(error)) => {
                        *state = Writing::Failed;
                        return Poll::Ready(Err(error.into()));
                    }
                    Poll::Pending => {
                        *state = Writing::Ending(future);
                        return Poll::Pending;
                    }
                },
                Writing::Ended | Writing::Waiting(_) => return Poll::Ready(Ok(())),
                Writing::Failed => {
                    *state = Writing::Failed;
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
            }
        }
    }
}

impl fmt::Debug for SlabWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabWriter").finish_non_exhaustive()
    }
}

/// Reads the bytes of slabs, whatever their bounds and notes.
///
/// It ends after the last slab; if the session fails before, it fails.
pub struct SlabReader {
    state: Mutex<Reading>,
    /// What was not yet read of the present slab.
    rest: Buffer,
}

enum Reading {
    Idle(SlabReceiver),
    Waiting(BoxFuture<'static, (SlabReceiver, Result<Option<Slab>, SessionError>)>),
    Ended,
}

impl SlabReader {
    /// Reads slabs of `receiver`.
    pub fn new(receiver: SlabReceiver) -> Self {
        Self { state: Mutex::new(Reading::Idle(receiver)), rest: Buffer::empty() }
    }
}

impl AsyncRead for SlabReader {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let this = &mut *self;
            if !this.rest.is_empty() {
                let now = this.rest.len().min(buf.remaining());
                buf.put_slice(&this.rest[..now]);
                this.rest = this.rest.slice(now..);
                if this.rest.is_empty() {
                    // Its memory goes back to the ring.
                    this.rest = Buffer::empty();
                }
                return Poll::Ready(Ok(()));
            }
            let state = this.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            match std::mem::replace(state, Reading::Ended) {
                Reading::Idle(mut receiver) => {
                    *state = Reading::Waiting(Box::pin(async move {
                        let next = receiver.next().await;
                        (receiver, next)
                    }));
                }
                Reading::Waiting(mut future) => match future.as_mut().poll(cx) {
                    Poll::Ready((receiver, Ok(Some(slab)))) => {
                        *state = Reading::Idle(receiver);
                        this.rest = slab.bytes;
                    }
                    Poll::Ready((_, Ok(None))) => return Poll::Ready(Ok(())),
                    Poll::Ready((_, Err(error))) => return Poll::Ready(Err(error.into())),
                    Poll::Pending => {
                        *state = Reading::Waiting(future);
                        return Poll::Pending;
                    }
                },
                Reading::Ended => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl fmt::Debug for SlabReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabReader").field("rest", &self.rest.len()).finish_non_exhaustive()
    }
}
