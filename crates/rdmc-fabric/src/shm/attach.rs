//! Sealed objects among the processes of a host: the owner hands out a descriptor for a token, and the peer maps it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;

use super::node::{HANDSHAKE_TIMEOUT, Node, same_user, socket_of};
use super::objects::Objects;
use super::wire::{self, Request, Response};
use crate::memory::{AttachError, Buffer, ObjectDescriptor, ObjectShare, SharedObject};

/// An object that peers can request.
struct Published {
    objects: Arc<Objects>,
    token: u128,
}

impl Drop for Published {
    fn drop(&mut self) {
        self.objects.withdraw(self.token);
    }
}

/// Lets peers request an object. The node must have been started.
pub(super) fn share(node: &Node, object: &SharedObject) -> ObjectShare {
    let token = node.objects.publish(object.file().clone());
    let descriptor = ObjectDescriptor { len: object.len() as u64, owner: node.name, token };
    ObjectShare::new(descriptor, Box::new(Published { objects: node.objects.clone(), token }))
}

/// Requests an object from its owner and maps it.
pub(super) async fn attach(object: ObjectDescriptor) -> Result<Buffer, AttachError> {
    let asked = tokio::time::timeout(HANDSHAKE_TIMEOUT, request_object(object)).await;
    let (response, files) = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|error| {
        // Of these errors, only a lack of descriptors or memory is this process's own.
        if is_exhausted(&error) { AttachError::Here(error) } else { AttachError::Unreachable(error) }
    })?;
    let len = object.len;
    match (response, <[OwnedFd; 1]>::try_from(files)) {
        (Some(Response::Memory(told)), Ok([file])) if told == len => SharedObject::attach(file, len),
        (Some(Response::Memory(told)), Err(none)) if told == len && none.is_empty() => {
            Err(AttachError::Here(io::Error::other("no descriptor arrived; this process may have too many open files")))
        }
        (Some(Response::Unknown), _) => Err(AttachError::NotShared),
        (Some(Response::Memory(_)), _) => Err(AttachError::Unsound { len, what: "it has another length" }),
        _ => Err(AttachError::Unsound { len, what: "it is not memory" }),
    }
}

async fn request_object(object: ObjectDescriptor) -> io::Result<(Option<Response>, Vec<OwnedFd>)> {
    let stream = loop {
        match UnixStream::connect(socket_of(object.owner)).await {
            // All members connect at about the same time, so the listener's queue may be full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(QUEUE_PAUSE).await,
            connected => break connected?,
        }
    };
    same_user(&stream)?;
    wire::send(&stream, &Request::Attach { token: object.token }.encode(), &[]).await?;
    let (response, files) = wire::receive::<{ Response::LEN }>(&stream).await?;
    Ok((Response::decode(response), files))
}

/// Tells whether this process, or its host, has run out of descriptors or memory.
fn is_exhausted(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    exhausted.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Pause before a connection to a full queue is retried.
const QUEUE_PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    fn node() -> Arc<Node> {
        let node = Node::new(Arc::default()).unwrap();
        node.start().unwrap();
        node
    }

    #[tokio::test]
    async fn an_object_is_attached_by_its_token_for_as_long_as_it_is_shared() {
        let node = node();
        let object = SharedObject::copy_of(&[7; 5000]).unwrap();
        let shared = share(&node, &object);
        let attached = attach(shared.descriptor()).await.unwrap();
        let again = share(&node, &object);
        assert_ne!(again.descriptor().token, shared.descriptor().token);
        let guessed = ObjectDescriptor { token: shared.descriptor().token ^ 1, ..shared.descriptor() };
        assert!(matches!(attach(guessed).await, Err(AttachError::NotShared)));
        let longer = ObjectDescriptor { len: 5001, ..shared.descriptor() };
        assert!(matches!(attach(longer).await, Err(AttachError::Unsound { .. })));
        let withdrawn = shared.descriptor();
        drop((shared, object));
        assert!(matches!(attach(withdrawn).await, Err(AttachError::NotShared)));
        let third = attach(again.descriptor()).await.unwrap();
        let owner = again.descriptor();
        drop((again, node));
        assert!(attached.iter().chain(third.iter()).all(|&byte| byte == 7), "they outlive their owner");
        // The owner's socket is gone when its task has ended.
        while !matches!(attach(owner).await, Err(AttachError::Unreachable(_))) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_a_peer_hands_over_is_looked_at() {
        let listener = UnixListener::bind(socket_of(0xbad)).unwrap();
        let unsealed = crate::memory::anonymous_file().unwrap();
        unsealed.set_len(10).unwrap();
        let liar = async {
            for (response, files) in [
                (Response::Memory(10), 1),
                (Response::Memory(11), 1),
                (Response::Granted, 1),
                (Response::Memory(10), 2),
            ] {
                let (stream, _) = listener.accept().await.unwrap();
                wire::receive::<{ Request::LEN }>(&stream).await.unwrap();
                let fd = std::os::fd::AsFd::as_fd(&unsealed);
                wire::send(&stream, &response.encode(), &[fd, fd][..files]).await.unwrap();
            }
            let (stream, _) = listener.accept().await.unwrap();
            drop(stream);
        };
        let asking = async {
            let object = ObjectDescriptor { len: 10, owner: 0xbad, token: 1 };
            for _ in 0..4 {
                assert!(matches!(attach(object).await, Err(AttachError::Unsound { .. })));
            }
            assert!(matches!(attach(object).await, Err(AttachError::Unreachable(_))));
        };
        futures::join!(liar, asking);
    }
}
