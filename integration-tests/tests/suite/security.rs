//! Tests of which nodes get in: over TCP, and with the program as a user runs it; with keys, certificates and neither.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rdmc::{Cluster, Fabric, GroupError, GroupSpec, Node, NodeBuilder, NodeId, Security, StartError};
use rdmc::{TcpConfig, TcpFabric};
use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{free_addresses, pattern, watched};
use crate::program::{code, command, finish, rdmc, text, tree, wait_until};

/// Signs certificates, and writes them to a directory with their keys.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    /// Writes a certificate for `name`, and returns the files of authority, certificate and key.
    fn issue(&self, name: &str, years: (i32, i32)) -> [PathBuf; 3] {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(years.0, 1, 1), rcgen::date_time_ymd(years.1, 1, 1));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        let file = |kind: &str| self.dir.path().join(format!("{name}-{}.{kind}", years.1));
        std::fs::write(file("pem"), certificate).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        std::fs::set_permissions(file("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        [self.dir.path().join("ca.pem"), file("pem"), file("key")]
    }

    fn security(&self, name: &str) -> Security {
        let [ca, certificate, key] = self.issue(name, GOOD);
        Security::tls_files(ca, certificate, key).unwrap()
    }

    /// Returns options of the program with a certificate for `name`.
    fn options(&self, name: &str, years: (i32, i32)) -> Vec<String> {
        let files = self.issue(name, years);
        let options = ["--tls-ca", "--tls-cert", "--tls-key"].into_iter().zip(files);
        options.flat_map(|(option, file)| [option.to_owned(), file.display().to_string()]).collect()
    }
}

fn tcp(encrypt: bool) -> Arc<dyn Fabric> {
    let mut config = TcpConfig::default();
    config.encrypt = encrypt;
    TcpFabric::with_config(config)
}

/// Prepares the nodes of a cluster on this host, with the names `zero`, `one` and `two`.
fn builders(securities: [Security; 3], encrypt: [bool; 3]) -> Vec<NodeBuilder> {
    let cluster = Cluster::new((0u32..).zip(free_addresses(3)));
    let cluster = (0..).map(NodeId).zip(NAMES).fold(cluster, |cluster, (node, name)| cluster.name(node, name));
    let prepared = (0..).zip(securities).zip(encrypt).map(|((id, security), encrypt)| {
        Node::builder(NodeId(id), cluster.clone()).fabric(tcp(encrypt)).security(security)
    });
    prepared.collect()
}

async fn started(builders: Vec<NodeBuilder>) -> Vec<Node> {
    futures::future::try_join_all(builders.into_iter().map(NodeBuilder::start)).await.expect("all nodes start")
}

#[tokio::test]
async fn a_fixed_cluster_multicasts_with_certificates_and_with_a_key_and_encrypted() {
    let authority = Authority::new();
    let certificates = NAMES.map(|name| authority.security(name));
    let key = [(); 3].map(|()| Security::shared_key([7; 32]));
    for (securities, encrypt) in
        [(certificates.clone(), false), (key.clone(), false), (certificates, true), (key, true)]
    {
        let nodes = watched(started(builders(securities, [encrypt; 3]))).await;
        assert_eq!(nodes[0].fabric_name(), if encrypt { "tcp+tls" } else { "tcp" });
        let spec = GroupSpec::new(1, nodes.iter().map(Node::id)).block_size(100_000);
        let joins = nodes[1..].iter().map(|node| node.join_group(spec.clone()));
        let (root, receivers) =
            futures::try_join!(nodes[0].create_group(spec.clone()), futures::future::try_join_all(joins)).unwrap();
        let sent = pattern(3_000_001, 5);
        let receive = receivers.into_iter().map(|mut receiver| async {
            assert!(receiver.next().await.unwrap().unwrap()[..] == sent[..]);
            receiver.close().await
        });
        let send = async {
            root.send(sent.clone()).await.unwrap();
            root.close().await
        };
        watched(async { futures::try_join!(send, futures::future::try_join_all(receive)).unwrap() }).await;
        assert!(nodes.iter().all(|node| node.stats().connections_refused == 0));
    }
}

#[tokio::test]
async fn a_member_that_claims_anothers_number_is_refused() {
    let authority = Authority::new();
    // Node 1 has the certificate of node 2, as if it claimed the number of another node.
    let mut nodes = builders(["zero", "two", "two"].map(|name| authority.security(name)), [false; 3]);
    let limit = Duration::from_secs(4);
    let starts = nodes.drain(..).map(|builder| builder.connect_limit(limit).start());
    let ends = watched(futures::future::join_all(starts)).await;
    let problems: Vec<_> = ends.into_iter().map(|end| end.err().map(|error| error.to_string())).collect();
    let says = |node: usize, text: &str| {
        let problem = problems[node].as_ref().expect("it does not start");
        assert!(problem.contains(text), "{problem}");
    };
    says(0, "its certificate is for two, not for one");
    says(1, "it does not take this node for node 1: its certificate would have to be for one, and is for two");
    assert!(problems[2].is_some());
}

#[tokio::test]
async fn a_node_without_security_gets_into_no_secure_cluster() {
    let mut prepared = builders([(); 3].map(|()| Security::shared_key([7; 32])), [false; 3]);
    let plain = prepared.remove(0).security(None).connect_limit(Duration::from_secs(4)).start();
    let others = prepared.into_iter().map(|builder| builder.connect_limit(Duration::from_secs(4)).start());
    let (plain, _) = watched(futures::future::join(plain, futures::future::join_all(others))).await;
    let error = plain.unwrap_err();
    assert!(matches!(error, StartError::Unreachable { .. }));
    assert!(error.to_string().contains("it speaks TLS only: this node needs a key or certificates"), "{error}");
}

#[tokio::test]
async fn nodes_that_do_not_agree_on_encryption_form_no_group() {
    let nodes = builders([(); 3].map(|()| Security::shared_key([7; 32])), [true, false, false]);
    let nodes = watched(started(nodes)).await;
    let spec = GroupSpec::new(1, nodes[..2].iter().map(Node::id));
    let (root, receiver) =
        watched(futures::future::join(nodes[0].create_group(spec.clone()), nodes[1].join_group(spec))).await;
    for error in [root.unwrap_err(), receiver.unwrap_err()] {
        let GroupError::Failed(failure) = error else { panic!("{error}") };
        assert!(failure.to_string().ends_with("both must, or neither"), "{failure}");
    }
}

/// A receiver's process; its stderr is kept.
struct Receiver {
    child: Child,
    address: String,
    first: Value,
    dir: TempDir,
    complaints: Arc<Mutex<String>>,
}

impl Receiver {
    fn start(options: &[impl AsRef<str>]) -> Self {
        let dir = TempDir::new().unwrap();
        let mut command = command(&["recv", "--listen", "127.0.0.1:0", "--json", "--dir"]);
        command.arg(dir.path()).args(options.iter().map(AsRef::as_ref)).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        std::thread::spawn(move || lines.for_each(drop));
        let complaints = Arc::new(Mutex::new(String::new()));
        let (kept, said) = (complaints.clone(), BufReader::new(child.stderr.take().unwrap()).lines());
        std::thread::spawn(move || {
            for line in said.map_while(Result::ok) {
                kept.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Self { child, address: first["address"].as_str().unwrap().to_owned(), first, dir, complaints }
    }

    /// Waits until it has logged these words, and returns how often.
    fn complains(&self, words: &str) -> usize {
        let count = || self.complaints.lock().unwrap().matches(words).count();
        wait_until("the receiver complains", || count() > 0);
        count()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(path: &Path, receivers: &[Receiver], options: &[impl AsRef<str>]) -> Output {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    let mut command = command(&["send", "--to", &to, "--block-size", "64k"]);
    finish(command.args(options.iter().map(AsRef::as_ref)).arg(path).spawn().unwrap())
}

/// Makes a directory with a file in it.
fn source() -> (TempDir, PathBuf) {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, pattern(1_000_001, 3)).unwrap();
    (source, path)
}

/// Makes a key with the program, and returns the options that use it.
pub(crate) fn key_in(dir: &TempDir, name: &str) -> Vec<String> {
    let path = dir.path().join(name);
    let made = rdmc(&["keygen".as_ref(), path.as_os_str()]);
    assert_eq!(code(&made), 0, "{made:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    vec!["--key".to_owned(), path.display().to_string()]
}

fn and(options: &[String], more: &str) -> Vec<String> {
    options.iter().cloned().chain([more.to_owned()]).collect()
}

#[test]
fn files_arrive_among_those_who_have_the_key_or_certificates_encrypted_or_not() {
    let (keys, (dir, path)) = (TempDir::new().unwrap(), source());
    let (key, authority) = (key_in(&keys, "key"), Authority::new());
    let (receiving, sending) = (authority.options("127.0.0.1", GOOD), authority.options("desk.example", GOOD));
    for (receiving, sending, proof) in [(key.clone(), key, "key"), (receiving, sending, "certificate")] {
        for encrypt in [false, true] {
            let with = |options: &[String]| if encrypt { and(options, "--encrypt") } else { options.to_vec() };
            let receivers = [(); 3].map(|()| Receiver::start(&with(&receiving)));
            assert_eq!(receivers[0].first["security"], proof);
            let sent = send(&path, &receivers, &with(&sending));
            assert_eq!(code(&sent), 0, "{proof} {encrypt}: {sent:?}");
            let said = text(&sent.stderr);
            assert_eq!(said.contains("by tcp+tls (--encrypt)"), encrypt, "{said}");
            for receiver in &receivers {
                assert_eq!(tree(receiver.dir.path()), tree(dir.path()));
                assert_eq!(*receiver.complaints.lock().unwrap(), "");
            }
        }
    }
}

#[test]
fn who_does_not_belong_is_told_why_and_complained_of_once() {
    let (keys, (_dir, path)) = (TempDir::new().unwrap(), source());
    let (one, other) = (key_in(&keys, "one"), key_in(&keys, "other"));
    let (authority, foreign) = (Authority::new(), Authority::new());
    let (here, none) = (authority.options("127.0.0.1", GOOD), Vec::new());
    // Options of the receiver and of the sender, the sender's error, and the receiver's log.
    let cases = [
        (&one, &other, "it has another key", "it has another key"),
        (&one, &none, "it speaks TLS only: this node needs a key or certificates", "it does not speak TLS"),
        (&none, &one, "it does not speak TLS: was it started without a key", "it speaks TLS, and this node does not"),
        (&here, &one, "one side has a shared key, the other certificates", "one side has a shared key"),
        (&here, &foreign.options("desk", GOOD), "its certificate is not of the authority", "refuses this node"),
        (&here, &authority.options("desk", PAST), "certificate has expired", "its certificate expired"),
        (&authority.options("127.0.0.1", PAST), &here, "its certificate expired", "certificate has expired"),
        (&authority.options("elsewhere", GOOD), &here, "its certificate is for elsewhere, not for 127.0.0.1", "name"),
    ];
    for (receiving, sending, told, complaint) in cases {
        let receiver = [Receiver::start(receiving)];
        let sent = send(&path, &receiver, sending);
        assert_eq!(code(&sent), 4, "{sent:?}");
        let said = text(&sent.stderr);
        assert!(said.contains(&receiver[0].address) && said.contains(told), "{told:?} is not in {said}");
        let refused = "control connection refused";
        assert_eq!(receiver[0].complains(refused), 1, "{told}");
        let complaints = receiver[0].complaints.lock().unwrap().clone();
        assert!(complaints.contains(complaint) && complaints.contains("127.0.0.1"), "{complaint:?}: {complaints}");
        assert!(tree(receiver[0].dir.path()).is_empty());
    }
}

#[test]
fn sender_and_receivers_agree_on_encryption_or_nothing_is_sent() {
    let (keys, (_dir, path)) = (TempDir::new().unwrap(), source());
    let key = key_in(&keys, "key");
    let receivers = [Receiver::start(&and(&key, "--encrypt")), Receiver::start(&key)];
    let sent = send(&path, &receivers, &and(&key, "--encrypt"));
    assert_eq!(code(&sent), 4, "{sent:?}");
    let said = text(&sent.stderr);
    assert!(
        said.contains(&format!("{} refused: it offers shm, tcp+shm, tcp, not tcp+tls", receivers[1].address)),
        "{said}"
    );
    assert_eq!(receivers[1].complains("no fabric in common"), 1);
    let sent = send(&path, &receivers, &key);
    assert!(text(&sent.stderr).contains("it offers tcp+tls, not shm, tcp+shm, tcp"), "{sent:?}");
}

#[test]
fn keys_are_not_overwritten_and_must_be_private() {
    let (keys, (_dir, path)) = (TempDir::new().unwrap(), source());
    let key = key_in(&keys, "key");
    let again = rdmc(&["keygen", &key[1]]);
    assert_eq!(code(&again), 1);
    assert!(text(&again.stderr).contains("exists; no key is overwritten"), "{again:?}");
    std::fs::set_permissions(&key[1], std::fs::Permissions::from_mode(0o644)).unwrap();
    let receiver = [Receiver::start(&Vec::<String>::new())];
    let sent = send(&path, &receiver, &key);
    assert_eq!(code(&sent), 1);
    assert!(text(&sent.stderr).contains("chmod 600"), "{sent:?}");
}

#[test]
fn options_that_contradict_each_other_end_with_2() {
    let keys = TempDir::new().unwrap();
    let key = key_in(&keys, "key");
    let base = ["send", "Cargo.toml", "--to", "h:1"];
    let cases: [(&[&str], &str); 5] = [
        (&["--encrypt"], "--encrypt needs --key"),
        (&["--encrypt", "--fabric", "verbs", "--key", &key[1]], "--encrypt needs TCP"),
        (&["--key", &key[1], "--tls-ca", "a", "--tls-cert", "b", "--tls-key", "c"], "cannot be used with"),
        (&["--tls-ca", "a"], "--tls-cert"),
        (&["--tls-cert", "a", "--tls-key", "b"], "--tls-ca"),
    ];
    for (options, said) in cases {
        let output = rdmc(&[&base[..], options].concat());
        assert_eq!(code(&output), 2, "{output:?}");
        assert!(text(&output.stderr).contains(said), "{output:?}");
    }
}

#[test]
fn a_receiver_for_everybody_says_so() {
    let keys = TempDir::new().unwrap();
    let key = key_in(&keys, "key");
    for (options, warned) in [(Vec::new(), true), (key, false)] {
        let dir = TempDir::new().unwrap();
        let mut command = command(&["recv", "--listen", "0.0.0.0:0", "--dir"]);
        let mut child = command.arg(dir.path()).args(&options).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.next().unwrap().starts_with("listening at 0.0.0.0:"));
        if warned {
            let warning = lines.next().unwrap();
            assert!(warning.starts_with("warning: anybody who reaches 0.0.0.0:"), "{warning}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(warned || lines.all(|line| !line.contains("anybody")));
    }
}

/// The names of the nodes of a fixed cluster.
const NAMES: [&str; 3] = ["zero", "one", "two"];
/// Years of valid certificates.
const GOOD: (i32, i32) = (2020, 4000);
/// Years of expired certificates.
const PAST: (i32, i32) = (2001, 2002);
