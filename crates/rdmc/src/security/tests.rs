//! Which ends are admitted, which are refused, and what both ends are told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rdmc_fabric::{ControlStream, Fabric, MemNetwork, TcpConfig, TcpFabric};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::mesh::Mesh;
use crate::mesh::listener::STRANGERS_PER_PEER_MAX;
use crate::stats::Refusals;
use crate::wire::{self, Frame, PROTOCOL_VERSION, RejectReason};
use crate::{Cluster, GroupSpec, InviteFailure, InviteOptions, Listener, Node, NodeId, StartError, invite};

/// Signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key in PEM form.
struct Issued {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn issue(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        Issued { certificate: params.signed_by(&key, &self.0).unwrap().pem(), key: key.serialize_pem() }
    }

    /// Makes the security of a node that trusts this authority.
    fn security_with(&self, issued: &Issued) -> Security {
        Security::tls_pem(self.0.pem().as_bytes(), issued.certificate.as_bytes(), issued.key.as_bytes()).unwrap()
    }

    fn security(&self, names: &[&str]) -> Security {
        self.security_with(&self.issue(names, |_| {}))
    }

    /// Makes the security of a node whose certificate has expired.
    fn expired(&self, name: &str) -> Security {
        self.security_with(&self.issue(&[name], |params| {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        }))
    }
}

fn key(byte: u8) -> Security {
    Security::shared_key([byte; 32])
}

/// Starts the nodes `a`, `b`, … of a cluster in this process, each with its own security.
async fn start(securities: &[Option<Security>]) -> Vec<Result<Node, StartError>> {
    let network = MemNetwork::new();
    let names = (b'a'..).map(|letter| char::from(letter).to_string());
    let cluster = Cluster::new((0u32..).zip(names).take(securities.len()));
    let starts = securities.iter().zip(0..).map(|(security, id)| {
        let builder = Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric());
        builder.security(security.clone()).connect_limit(LIMIT).start()
    });
    futures::future::join_all(starts).await
}

/// Sends a message to all.
async fn multicast(nodes: &[Node]) {
    let spec = GroupSpec::new(1, nodes.iter().map(Node::id)).block_size(10_000);
    let joins = nodes[1..].iter().map(|node| node.join_group(spec.clone()));
    let (root, receivers) =
        futures::try_join!(nodes[0].create_group(spec.clone()), futures::future::try_join_all(joins)).unwrap();
    let receive = receivers.into_iter().map(|mut receiver| async move {
        assert_eq!(receiver.next().await.unwrap().unwrap()[..], [7; 123_456]);
        receiver.close().await
    });
    let send = async {
        root.send(vec![7; 123_456]).await.unwrap();
        root.close().await
    };
    futures::try_join!(send, futures::future::try_join_all(receive)).unwrap();
}

async fn multicast_among(securities: &[Option<Security>]) {
    let nodes: Vec<_> = start(securities).await.into_iter().map(Result::unwrap).collect();
    multicast(&nodes).await;
    assert!(nodes.iter().all(|node| node.stats().connections_refused == 0));
}

#[tokio::test]
async fn nodes_with_certificates_of_one_authority_multicast() {
    let authority = Authority::new();
    let names = ["a", "b", "c"];
    multicast_among(&names.map(|name| Some(authority.security(&[name])))).await;
    // One certificate may have several names.
    multicast_among(&names.map(|_| Some(authority.security(&names)))).await;
}

#[tokio::test]
async fn nodes_with_one_key_multicast() {
    multicast_among(&[(); 3].map(|()| Some(key(1)))).await;
}

#[tokio::test]
async fn invited_nodes_multicast_over_encrypted_connections() {
    let authority = Authority::new();
    let at_localhost = || authority.security(&["localhost", "127.0.0.1"]);
    for (inviting, invited) in [(authority.security(&["desk"]), at_localhost()), (key(1), key(1))] {
        let mut config = TcpConfig::default();
        config.encrypt = true;
        let fabric = || -> Arc<dyn Fabric> { TcpFabric::with_config(config) };
        let mut listeners = Vec::new();
        for _ in 0..2 {
            listeners.push(Listener::bind(fabric(), "127.0.0.1:0").security(invited.clone()).await.unwrap());
        }
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
        let accept =
            futures::future::join_all(listeners.iter().map(|listener| async {
                listener.next_invitation().await.accept().await.unwrap().start().await.unwrap()
            }));
        let first = async {
            let invited = invite(fabric(), &addresses, InviteOptions::new(LIMIT).security(inviting)).await;
            invited.unwrap().start().await.unwrap()
        };
        let (first, others) = futures::join!(first, accept);
        let nodes: Vec<_> = std::iter::once(first).chain(others).collect();
        multicast(&nodes).await;
        assert!(listeners.iter().all(|listener| listener.stats().connections_refused == 0));
    }
}

/// Returns the refusal that node 0 of a cluster of two gets when it opens the connection, and how often each refused.
async fn pair(opening: Option<Security>, accepting: Option<Security>) -> (String, [u64; 2]) {
    let network = MemNetwork::new();
    let fabric: Arc<dyn Fabric> = network.fabric();
    let listener = Listener::bind(fabric, "b").security(accepting).await.unwrap();
    let cluster = Cluster::new([(0, "a"), (1, "b")]);
    let _arrivals = listener.register(&cluster, NodeId(1));
    let peers = PeerSecurity { security: opening, identities: cluster.identities(), refusals: Refusals::default() };
    let mesh = Mesh::new(NodeId(0), 0, BTreeMap::new(), network.fabric().environment(), Duration::from_secs(2), peers);
    let failed = mesh.say_hello(NodeId(1), "b", None).await.err().expect("they refuse each other").to_string();
    // The other end reads only later that it was refused.
    let environment = network.fabric().environment();
    let counted = async {
        while listener.stats().connections_refused == 0 {
            environment.sleep(Duration::from_millis(1)).await;
        }
    };
    environment.timeout(LIMIT, counted).await.expect("the listener counts");
    (failed.strip_prefix("b: ").unwrap().to_owned(), [mesh.refused(), listener.stats().connections_refused])
}

/// Asserts that two nodes refuse each other, with this message at the opening one.
async fn assert_refused(opening: Option<Security>, accepting: Option<Security>, said: &str) {
    let (problem, [_, at_listener]) = pair(opening, accepting).await;
    assert!(problem.contains(said), "{problem:?} instead of {said:?}");
    assert_eq!(at_listener, 1, "{said}");
}

#[tokio::test]
async fn a_node_whose_certificate_is_for_another_name_is_refused() {
    let authority = Authority::new();
    let (a, b, c) = (authority.security(&["a"]), authority.security(&["b"]), authority.security(&["c", "d"]));
    assert_refused(Some(a), Some(c.clone()), "its certificate is for c, d, not for b").await;
    let claims = "it does not take this node for node 0: its certificate would have to be for a, and is for c, d";
    assert_refused(Some(c), Some(b), claims).await;
}

#[tokio::test]
async fn certificates_that_have_expired_are_refused() {
    let authority = Authority::new();
    let (a, b) = (authority.security(&["a"]), authority.security(&["b"]));
    let (problem, refused) = pair(Some(a), Some(authority.expired("b"))).await;
    assert!(problem.contains("its certificate expired ") && problem.contains(" days ago"), "{problem}");
    assert_eq!(refused, [1, 1]);
    assert_refused(Some(authority.expired("a")), Some(b), "this node's certificate has expired").await;
    let early = authority.issue(&["b"], |params| params.not_before = rcgen::date_time_ymd(3000, 1, 1));
    let early = authority.security_with(&early);
    assert_refused(Some(authority.security(&["a"])), Some(early), "its certificate is not valid yet").await;
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused() {
    let (one, other) = (Authority::new(), Authority::new());
    let (a, b) = (one.security(&["a"]), one.security(&["b"]));
    assert_refused(Some(a), Some(other.security(&["b"])), "its certificate is not of the authority").await;
    // Trusts the other end, but is not trusted by it.
    let foreign = other.issue(&["a"], |_| {});
    let foreign =
        Security::tls_pem(one.0.pem().as_bytes(), foreign.certificate.as_bytes(), foreign.key.as_bytes()).unwrap();
    assert_refused(Some(foreign), Some(b), "it refuses this node: this node's certificate is of an authority").await;
}

#[tokio::test]
async fn certificates_for_other_purposes_are_refused() {
    let authority = Authority::new();
    let only = |name: &str, purpose| {
        authority.security_with(&authority.issue(&[name], |params| params.extended_key_usages = vec![purpose]))
    };
    let (server, client) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
    let said = "its certificate must be good for servers and for clients";
    assert_refused(Some(authority.security(&["a"])), Some(only("b", client)), said).await;
    let told = "this node's certificate is not good for servers and clients";
    assert_refused(Some(only("a", server)), Some(authority.security(&["b"])), told).await;
}

#[tokio::test]
async fn another_key_is_refused() {
    assert_refused(Some(key(1)), Some(key(2)), "it has another key").await;
}

#[tokio::test]
async fn a_key_and_certificates_do_not_go_together() {
    let authority = Authority::new();
    assert_refused(Some(key(1)), Some(authority.security(&["b"])), "one side has a shared key").await;
    assert_refused(Some(authority.security(&["a"])), Some(key(1)), "one side has a shared key").await;
}

#[tokio::test]
async fn a_plain_end_and_a_secure_one_refuse_each_other() {
    assert_refused(Some(key(1)), None, "it does not speak TLS: was it started without a key or certificates?").await;
    assert_refused(None, Some(key(1)), "it speaks TLS only: this node needs a key or certificates").await;
}

#[tokio::test]
async fn a_node_without_a_possible_name_is_told() {
    let authority = Authority::new();
    let network = MemNetwork::new();
    let cluster = Cluster::new([(0, "a"), (1, "no name")]);
    let _listener = Listener::bind(network.fabric() as Arc<dyn Fabric>, "no name").await.unwrap();
    let (security, identities) = (Some(authority.security(&["a"])), cluster.identities());
    let peers = PeerSecurity { security, identities, refusals: Refusals::default() };
    let mesh = Mesh::new(NodeId(0), 0, BTreeMap::new(), network.fabric().environment(), Duration::from_secs(2), peers);
    let problem = mesh.say_hello(NodeId(1), "no name", None).await.err().expect("it is refused").to_string();
    assert!(problem.contains("\"no name\" is neither a DNS name nor an IP address"), "{problem}");
    let named = cluster.name(NodeId(1), "b");
    assert_eq!(named.identities()[&NodeId(1)], Identity::Name("b".into()));
}

/// A listener of the node 1 of a cluster of three, and a way to open connections to it.
struct Door {
    network: MemNetwork,
    listener: Listener,
    arrivals: tokio::sync::mpsc::Receiver<crate::mesh::listener::NodeConnection>,
}

impl Door {
    async fn of(security: Option<Security>, cluster: Cluster) -> Self {
        let network = MemNetwork::new();
        let fabric: Arc<dyn Fabric> = network.fabric();
        let listener = Listener::bind(fabric, "b").security(security).await.unwrap();
        let arrivals = listener.register(&cluster, NodeId(1));
        Self { network, listener, arrivals }
    }

    async fn knock(&self) -> Box<dyn ControlStream> {
        self.network.fabric().environment().connect("b").await.unwrap()
    }

    async fn enter(&self, security: &Security) -> std::io::Result<Box<dyn ControlStream>> {
        security.connect(&*self.network.fabric().environment(), self.knock().await, "b").await
    }

    fn refused(&self) -> u64 {
        self.listener.stats().connections_refused
    }
}

fn hello(from: u32) -> Vec<u8> {
    let (from, to) = (NodeId(from), NodeId(1));
    wire::encode(&Frame::Hello { version: PROTOCOL_VERSION, cluster: 0, from, to, incarnation: 0 })
}

fn abc() -> Cluster {
    Cluster::new([(0, "a"), (1, "b"), (2, "c")])
}

#[tokio::test]
async fn nobody_but_the_inviting_node_is_node_0_of_an_invited_cluster() {
    let authority = Authority::new();
    let (inviting, other) = (authority.issue(&["desk"], |_| {}), authority.security(&["desk", "a"]));
    let seen = CertificateDer::from_pem_slice(inviting.certificate.as_bytes()).unwrap();
    let cluster = abc().invited_by(Some(Fingerprint::of(&seen)));
    let mut door = Door::of(Some(authority.security(&["b"])), cluster).await;
    let mut impostor = door.enter(&other).await.unwrap();
    impostor.write_all(&hello(0)).await.unwrap();
    impostor.flush().await.unwrap();
    let answer = wire::read(&mut impostor).await.unwrap();
    let Some(Frame::Reject { reason: RejectReason::Declined { reason } }) = answer else { panic!("{answer:?}") };
    assert!(reason.contains("not that of the node that invited"), "{reason}");
    assert_eq!(door.refused(), 1);
    let inviting = authority.security_with(&inviting);
    let mut stream = door.enter(&inviting).await.unwrap();
    stream.write_all(&hello(0)).await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(door.arrivals.recv().await.unwrap().from, NodeId(0));
    assert_eq!(door.refused(), 1);
}

#[tokio::test]
async fn an_end_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let door = Door::of(Some(authority.security(&["b"])), abc()).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.0.pem().as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(tls::provider()).with_protocol_versions(&[&TLS13]).unwrap();
    let client = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    let security = authority.security(&["a"]);
    let server = security.0.server.clone();
    let anonymous = Security(Arc::new(SecurityShared { proof: Proof::Certificate, client, server }));
    let mut stream = door.enter(&anonymous).await.unwrap();
    let error = wire::read(&mut stream).await.unwrap_err();
    assert_eq!(error.to_string(), "it asks for a certificate");
    drop(stream);
    assert_eq!(door.refused(), 1);
}

#[tokio::test]
async fn what_is_not_tls_after_all_is_refused() {
    let door = Door::of(Some(key(1)), abc()).await;
    let mut stream = door.knock().await;
    stream.write_all(b"\xffTLK").await.unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"\xffTLK");
    stream.write_all(&[0; 64]).await.unwrap();
    // An alert, and the end.
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert_eq!(door.refused(), 1);
}

#[tokio::test]
async fn a_long_frame_without_tls_is_refused_and_not_kept() {
    let door = Door::of(Some(key(1)), abc()).await;
    let mut stream = door.knock().await;
    stream.write_all(&(4u32 << 20).to_le_bytes()).await.unwrap();
    for _ in 0..4 << 10 {
        stream.write_all(&[0; 1 << 10]).await.unwrap();
    }
    stream.write_all(&[0; wire::CHECK_LEN]).await.unwrap();
    let answer = wire::read(&mut stream).await.unwrap();
    assert!(matches!(answer, Some(Frame::Reject { reason: RejectReason::Declined { .. } })), "{answer:?}");
    assert_eq!(door.refused(), 1);
}

#[tokio::test]
async fn handshakes_that_do_not_end_are_bounded() {
    let mut door = Door::of(Some(key(1)), abc()).await;
    let mut waiting = Vec::new();
    for _ in 0..256 {
        let mut stream = door.knock().await;
        stream.write_all(b"\xffTLK").await.unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.unwrap();
        waiting.push(stream);
    }
    // All come from one peer: the oldest are closed, and the newest are not.
    let kept = waiting.split_off(256 - STRANGERS_PER_PEER_MAX);
    for mut stream in waiting {
        assert!(matches!(stream.read(&mut [0; 4]).await, Ok(0) | Err(_)), "it is answered as if there were room");
    }
    assert_eq!(door.refused(), 256 - STRANGERS_PER_PEER_MAX as u64);
    for mut stream in kept {
        assert!(stream.read(&mut [0; 4]).now_or_never().is_none());
    }
    // A holder of the key is admitted, and does not count among them.
    let mut stream = door.enter(&key(1)).await.unwrap();
    stream.write_all(&hello(0)).await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(door.arrivals.recv().await.unwrap().from, NodeId(0));
}

#[tokio::test]
async fn listeners_with_certificates_take_invitations_from_their_authority_only() {
    let (authority, other) = (Authority::new(), Authority::new());
    let security = authority.security(&["127.0.0.1"]);
    let listener = Listener::bind(TcpFabric::new(), "127.0.0.1:0").security(security).await.unwrap();
    let addresses = [listener.local_address().to_owned()];
    let foreign = other.issue(&["127.0.0.1"], |_| {});
    let untrusted =
        Security::tls_pem(authority.0.pem().as_bytes(), foreign.certificate.as_bytes(), foreign.key.as_bytes());
    for (security, refusal) in [
        (Some(untrusted.unwrap()), "it refuses this node"),
        (Some(other.security(&["127.0.0.1"])), "not of the authority"),
        (Some(key(1)), "one side has a shared key"),
        (None, "it speaks TLS only"),
    ] {
        let secure = security.is_some();
        let failed =
            invite(TcpFabric::new(), &addresses, InviteOptions::new(LIMIT).security(security)).await.unwrap_err();
        let [(_, failure)] = &failed.failures[..] else { panic!("{failed}") };
        assert!(failure.to_string().contains(refusal), "{failure}");
        assert_eq!(matches!(failure, InviteFailure::Insecure(_)), secure, "{failure:?}");
    }
    assert_eq!(listener.stats().connections_refused, 4);
}

#[tokio::test]
async fn node_and_listener_are_both_secure_or_neither() {
    let network = MemNetwork::new();
    for (node, listening) in [(Some(key(1)), None), (None, Some(key(1)))] {
        let fabric: Arc<dyn Fabric> = network.fabric();
        let address = if node.is_some() { "x" } else { "y" };
        let listener = Listener::bind(fabric, address).security(listening).await.unwrap();
        let builder = Node::builder(NodeId(1), abc()).fabric(network.fabric()).security(node).listener(listener);
        assert!(matches!(builder.start().await, Err(StartError::Listen { .. })));
    }
}

#[test]
fn what_is_wrong_with_files_is_said_with_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let authority = Authority::new();
    let (one, other) = (authority.issue(&["a"], |_| {}), authority.issue(&["b"], |_| {}));
    let ca = put("ca.pem", authority.0.pem().as_bytes());
    let (certificate, key) = (put("a.pem", one.certificate.as_bytes()), put("a.key", one.key.as_bytes()));
    let (garbage, others) = (put("garbage", b"not PEM"), put("b.key", other.key.as_bytes()));
    let broken = put("broken.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    Security::tls_files(&ca, &certificate, &key).unwrap();
    let gone = dir.path().join("gone");
    for (files, name, expected) in [
        ([&gone, &certificate, &key], "gone", "cannot read"),
        ([&garbage, &certificate, &key], "garbage", "has no certificate"),
        ([&broken, &certificate, &key], "broken.pem", "cannot be used"),
        ([&ca, &garbage, &key], "garbage", "has no certificate"),
        ([&ca, &broken, &key], "broken.pem", "cannot be used"),
        ([&ca, &certificate, &certificate], "a.pem", "has no private key"),
        ([&ca, &certificate, &others], "b.key", "does not belong to the certificate in"),
    ] {
        let said = Security::tls_files(files[0], files[1], files[2]).unwrap_err().to_string();
        assert!(said.contains(name) && said.contains(expected), "{said}");
    }
    let said = Security::key_file(put("short.key", b"secret\n")).unwrap_err().to_string();
    assert!(said.contains("short.key has 7 bytes, which is too short for a key"), "{said}");
    assert!(matches!(Security::key_file(&gone), Err(SecurityError::Unreadable { .. })));
}

#[test]
fn a_key_may_be_written_in_several_ways() {
    let digits = "07".repeat(32);
    for written in [vec![7; 32], digits.clone().into(), format!("{digits}\n").into(), format!("{digits}\r\n").into()] {
        assert_eq!(parse_key(&written), Some([7; 32]));
    }
    // A key may end like a line, and is not cut.
    assert_eq!(parse_key(&[b'\n'; 32]), Some([b'\n'; 32]));
    let text = b"correct horse battery staple, and a good deal more".as_slice();
    let key = parse_key(text).unwrap();
    assert_eq!(parse_key(&[text, b"\n"].concat()), Some(key));
    assert_ne!(parse_key(&[text, b"."].concat()), Some(key));
    for short in [&b""[..], b"\n", b"password", &[7; 31], &[b'\n'; 100]] {
        assert_eq!(parse_key(short), None, "{short:?}");
    }
}

#[test]
fn the_host_in_an_address_is_the_name() {
    for (address, name) in [
        ("host:7400", "host"),
        ("10.0.0.1:7400", "10.0.0.1"),
        ("[::1]:7400", "::1"),
        ("::1", "::1"),
        ("host", "host"),
        ("[::1]", "::1"),
        ("", ""),
    ] {
        assert_eq!(host(address), name);
    }
}

#[test]
fn secrets_are_not_printed() {
    assert_eq!(format!("{:?}", key(1)), "Security { proof: Key, .. }");
}

const LIMIT: Duration = Duration::from_secs(60);
