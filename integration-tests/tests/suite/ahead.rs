//! Tests of the connections that a group opens before its members have agreed on them.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rdmc::{Algorithm, Fabric, TcpFabric};
use rdmc_fabric::{ControlListener, ControlStream, Environment, FabricDecorator, Timestamp};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::cluster::{Kind, form, pattern, spec_of_all, start_on, take_all, watched};

/// TCP to peers that seem to be `round_trip` away. It notes which connections are opened ahead.
#[derive(Debug)]
struct DistantFabric {
    inner: Arc<TcpFabric>,
    environment: Arc<DistantEnvironment>,
    ahead: Mutex<Vec<(String, u16)>>,
}

impl DistantFabric {
    fn new(round_trip: Duration) -> Arc<Self> {
        let inner = TcpFabric::new();
        let environment = Arc::new(DistantEnvironment { inner: inner.environment(), round_trip });
        Arc::new(Self { inner, environment, ahead: Mutex::default() })
    }
}

impl FabricDecorator for DistantFabric {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn connect_ahead(&self, address: &str, connections: u16) {
        self.ahead.lock().expect("no test panics with it").push((address.to_owned(), connections));
        self.inner.connect_ahead(address, connections);
    }
}

#[derive(Debug)]
struct DistantEnvironment {
    inner: Arc<dyn Environment>,
    round_trip: Duration,
}

#[deny(clippy::missing_trait_methods)]
impl Environment for DistantEnvironment {
    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        self.inner.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.inner.spawn(task);
    }

    fn give_way(&self) -> BoxFuture<'static, ()> {
        self.inner.give_way()
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        self.inner.fill_random(bytes);
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        self.inner.listen(address)
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        let round_trip = self.round_trip;
        let connected = self.inner.connect(address);
        async move { Ok(Box::new(DistantStream { inner: connected.await?, round_trip }) as Box<dyn ControlStream>) }
            .boxed()
    }
}

struct DistantStream {
    inner: Box<dyn ControlStream>,
    round_trip: Duration,
}

impl ControlStream for DistantStream {
    fn peer_address(&self) -> Option<IpAddr> {
        self.inner.peer_address()
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(self.round_trip)
    }
}

impl AsyncRead for DistantStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for DistantStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn connections_to_distant_neighbours_are_opened_ahead_by_the_node_that_opens_them() {
    watched(async {
        for (round_trip, is_distant) in [(Duration::from_micros(100), false), (Duration::from_millis(5), true)] {
            let fabrics: Vec<_> = (0..3).map(|_| DistantFabric::new(round_trip)).collect();
            let nodes = start_on(fabrics.iter().map(|fabric| fabric.clone() as Arc<dyn Fabric>).collect(), Kind::Tcp);
            let nodes = nodes.await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, 64 << 10);
            let (root, receivers) = form(&nodes, &spec).await;
            let content = pattern(1 << 20, 1);
            let taking = futures::future::join_all(receivers.into_iter().map(take_all));
            let sending = async {
                root.send(content.clone()).await.expect("all receive it");
                root.close().await.expect("the group closes")
            };
            let (messages, _) = futures::join!(taking, sending);
            assert!(messages.iter().all(|messages| messages[0][..] == content[..]));
            // Two queue pairs to the next member of the chain, and one from the root to each for the table.
            let dialled = |node: usize| {
                fabrics[node].ahead.lock().expect("no test panics with it").iter().map(|(_, count)| *count).collect()
            };
            let dialled: Vec<Vec<u16>> = (0..3).map(dialled).collect();
            match is_distant {
                true => assert_eq!(dialled, [vec![3, 1], vec![2], vec![]]),
                false => assert!(dialled.iter().all(Vec::is_empty), "{dialled:?}"),
            }
        }
    })
    .await;
}
