//! Connections that have not yet said, or proved, who they are.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

use crate::sync::lock;

/// Bounds the connections of strangers, for each peer and in all.
///
/// A stranger is a connection that has not yet said, or proved, who it is. When there is no room for another one, the
/// oldest is closed for it: of the same peer if that has too many, else of the peer that has the most. Among these, the
/// connections that have sent nothing go first. So silent connections keep nobody out, however many there are.
///
/// A peer is an IPv4 address, or the /64 network of an IPv6 address. Connections without an address count as one peer.
#[derive(Debug)]
pub struct Strangers {
    per_peer_max: usize,
    max: usize,
    state: Mutex<StrangersState>,
}

#[derive(Debug, Default)]
struct StrangersState {
    next: u64,
    /// By number: the oldest comes first.
    connections: BTreeMap<u64, Connection>,
}

#[derive(Debug)]
struct Connection {
    peer: Option<IpAddr>,
    has_spoken: bool,
    displaced: oneshot::Sender<()>,
}

/// The place of one connection among the [`Strangers`]. Dropping it makes room.
pub struct StrangerPlace {
    strangers: Arc<Strangers>,
    number: u64,
}

/// Tells a connection that it is to be closed, since another one needed its place.
pub struct Displacement(oneshot::Receiver<()>);

impl Strangers {
    /// Bounds strangers to `per_peer_max` connections of each peer, and `max` in all.
    ///
    /// # Panics
    /// If a bound is zero.
    pub fn new(per_peer_max: usize, max: usize) -> Arc<Self> {
        assert!(per_peer_max > 0 && max > 0, "the newest connection always has a place");
        Arc::new(Self { per_peer_max, max, state: Mutex::default() })
    }

    /// Tells whether a connection from this address has a place without closing another one.
    ///
    /// If not, the caller lets other tasks run before it calls [`admit`](Self::admit): what has arrived on the older
    /// connections is read then.
    pub fn has_room_for(&self, from: Option<IpAddr>) -> bool {
        lock(&self.state).crowded_peer(from.map(peer_of), self.per_peer_max, self.max).is_none()
    }

    /// Gives a new connection a place; displaces another one if there is no room.
    pub fn admit(self: &Arc<Self>, from: Option<IpAddr>) -> (StrangerPlace, Displacement) {
        let peer = from.map(peer_of);
        let mut state = lock(&self.state);
        if let Some(crowded) = state.crowded_peer(peer, self.per_peer_max, self.max) {
            state.displace_one_of(crowded);
        }
        let number = state.next;
        state.next += 1;
        let (displaced, displacement) = oneshot::channel();
        state.connections.insert(number, Connection { peer, has_spoken: false, displaced });
        (StrangerPlace { strangers: self.clone(), number }, Displacement(displacement))
    }
}

impl StrangersState {
    /// Returns the peer that has to give up a connection for a new one from `peer`; `None` if there is room.
    fn crowded_peer(&self, peer: Option<IpAddr>, per_peer_max: usize, max: usize) -> Option<Option<IpAddr>> {
        let of_same = self.connections.values().filter(|known| known.peer == peer).count();
        if of_same >= per_peer_max {
            return Some(peer);
        }
        if self.connections.len() < max {
            return None;
        }
        let mut counts: BTreeMap<Option<IpAddr>, usize> = BTreeMap::new();
        self.connections.values().for_each(|known| *counts.entry(known.peer).or_default() += 1);
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(peer, _)| peer)
    }

    fn displace_one_of(&mut self, peer: Option<IpAddr>) {
        let of_peer = || self.connections.iter().filter(|(_, known)| known.peer == peer);
        let oldest_silent = of_peer().find(|(_, known)| !known.has_spoken);
        let oldest = oldest_silent.or_else(|| of_peer().next()).map(|(number, _)| *number);
        if let Some(connection) = oldest.and_then(|number| self.connections.remove(&number)) {
            // Fails only if the connection is ending anyway.
            let _ = connection.displaced.send(());
        }
    }
}

impl StrangerPlace {
    /// Notes that the connection has sent something: silent ones are displaced before it.
    pub fn note_spoken(&self) {
        if let Some(connection) = lock(&self.strangers.state).connections.get_mut(&self.number) {
            connection.has_spoken = true;
        }
    }
}

impl Drop for StrangerPlace {
    fn drop(&mut self) {
        lock(&self.strangers.state).connections.remove(&self.number);
    }
}

impl fmt::Debug for StrangerPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StrangerPlace").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Displacement {
    /// Runs `future` unless the connection is displaced before; returns `None` then.
    pub async fn unless_displaced<T>(self, future: impl Future<Output = T>) -> Option<T> {
        let displaced = async {
            if self.0.await.is_err() {
                // It has left the strangers by itself.
                std::future::pending::<()>().await;
            }
        };
        let (future, displaced) = (std::pin::pin!(future), std::pin::pin!(displaced));
        match futures::future::select(future, displaced).await {
            futures::future::Either::Left((value, _)) => Some(value),
            futures::future::Either::Right(_) => None,
        }
    }
}

impl fmt::Debug for Displacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Displacement").finish_non_exhaustive()
    }
}

/// Returns what counts as one peer: hosts with IPv6 choose among the addresses of a /64 network.
fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    /// Admits so many connections of a peer.
    fn admit(strangers: &Arc<Strangers>, from: Option<IpAddr>, count: usize) -> Vec<(StrangerPlace, Displacement)> {
        (0..count).map(|_| strangers.admit(from)).collect()
    }

    /// Tells which of the connections are displaced, by their index.
    fn displaced(connections: Vec<(StrangerPlace, Displacement)>) -> Vec<usize> {
        let is_displaced = |displacement: Displacement| {
            displacement.unless_displaced(std::future::pending::<()>()).now_or_never().is_some()
        };
        let displacements = connections.into_iter().map(|(place, displacement)| {
            std::mem::forget(place);
            displacement
        });
        displacements.enumerate().filter_map(|(index, it)| is_displaced(it).then_some(index)).collect()
    }

    #[test]
    fn the_oldest_silent_connection_of_a_peer_with_too_many_goes_first() {
        let strangers = Strangers::new(4, 100);
        let many = admit(&strangers, address(1), 4);
        many[0].0.note_spoken();
        let others = admit(&strangers, address(2), 3);
        assert!(!strangers.has_room_for(address(1)) && strangers.has_room_for(address(2)));
        let _newest = admit(&strangers, address(1), 2);
        assert_eq!(displaced(many), [1, 2], "the first has spoken");
        assert_eq!(displaced(others), []);
    }

    #[test]
    fn a_peer_whose_connections_have_all_spoken_gives_up_its_oldest() {
        let strangers = Strangers::new(3, 100);
        let many = admit(&strangers, address(1), 3);
        many.iter().for_each(|(place, _)| place.note_spoken());
        let _newest = admit(&strangers, address(1), 1);
        assert_eq!(displaced(many), [0]);
    }

    #[test]
    fn when_all_places_are_taken_the_peer_with_the_most_gives_one_up() {
        let strangers = Strangers::new(8, 10);
        let slow = admit(&strangers, address(9), 1);
        let few = admit(&strangers, address(1), 2);
        let many = admit(&strangers, address(2), 7);
        assert!(!strangers.has_room_for(address(3)));
        let _newest = admit(&strangers, address(3), 3);
        assert_eq!(displaced(many), [0, 1, 2]);
        assert_eq!((displaced(few), displaced(slow)), (vec![], vec![]), "an honest slow peer keeps its place");
    }

    #[test]
    fn no_more_are_kept_than_there_are_places() {
        let strangers = Strangers::new(8, 20);
        let connections: Vec<_> = (0..=255).flat_map(|last| admit(&strangers, address(last), 4)).collect();
        assert_eq!(lock(&strangers.state).connections.len(), 20);
        drop(connections);
        assert!(lock(&strangers.state).connections.is_empty());
    }

    #[test]
    fn a_connection_that_has_left_is_not_displaced() {
        let strangers = Strangers::new(1, 1);
        let (place, displacement) = strangers.admit(None);
        drop(place);
        let _newest = admit(&strangers, None, 1);
        assert!(displacement.unless_displaced(std::future::pending::<()>()).now_or_never().is_none());
    }

    #[test]
    fn addresses_of_one_network_are_one_peer() {
        let peer = |text: &str| peer_of(text.parse().expect("an address"));
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1:2:3"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:10.0.0.1"), peer("10.0.0.1"));
        assert_ne!(peer("10.0.0.1"), peer("10.0.0.2"));
    }
}
