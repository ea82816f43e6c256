//! The path between two gateways, which can be cut, closed and held up.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Passes connections on to a gateway.
pub(super) struct Path {
    pub(super) address: String,
    state: watch::Sender<PathState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PathState {
    cuts: u64,
    /// New connections are closed at once.
    is_closed: bool,
    /// Bytes wait.
    is_stalled: bool,
}

impl Path {
    pub(super) async fn to(gateway: String) -> Self {
        let (state, place) = (watch::Sender::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let address = place.local_addr().unwrap().to_string();
        tokio::spawn(accept(place, gateway, state.subscribe()));
        Self { address, state }
    }

    /// Resets all connections, or ends them in good order.
    pub(super) fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// Lets no new connections pass, or lets them pass again.
    pub(super) fn close(&self, is_closed: bool) {
        self.state.send_modify(|state| state.is_closed = is_closed);
    }

    /// Holds up all bytes, or lets them go on.
    pub(super) fn stall(&self, is_stalled: bool) {
        self.state.send_modify(|state| state.is_stalled = is_stalled);
    }
}

async fn accept(place: TcpListener, gateway: String, state: watch::Receiver<PathState>) {
    loop {
        let Ok((near, _)) = place.accept().await else { continue };
        if !state.borrow().is_closed {
            tokio::spawn(pass(near, gateway.clone(), state.clone()));
        }
    }
}

/// Passes the bytes of a connection on until it ends or is cut.
async fn pass(near: TcpStream, gateway: String, mut state: watch::Receiver<PathState>) {
    let Ok(far) = TcpStream::connect(&gateway).await else { return };
    let cuts = state.borrow().cuts;
    let (near_stalled, far_stalled) = (state.clone(), state.clone());
    let ((near_from, near_to), (far_from, far_to)) = (near.into_split(), far.into_split());
    let mut there = tokio::spawn(pump(near_from, far_to, near_stalled));
    let mut back = tokio::spawn(pump(far_from, near_to, far_stalled));
    tokio::select! {
        _ = state.wait_for(|state| state.cuts > cuts) => {}
        _ = async { tokio::join!(&mut there, &mut back) } => return,
    }
    there.abort();
    back.abort();
}

/// Passes the bytes of one direction on, then its end.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut state: watch::Receiver<PathState>) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes).await {
        if state.wait_for(|state| !state.is_stalled).await.is_err() || to.write_all(&bytes[..len]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
