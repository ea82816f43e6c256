//! Examples of command lines in the help.

use crate::exit;

/// Examples of `rdmc send`, and the exit codes.
pub(crate) fn of_send() -> String {
    format!("{SEND}\n{}", exit::HELP)
}

/// Examples of `rdmc recv`, and the exit codes.
pub(crate) fn of_recv() -> String {
    format!("{RECV}\n{}", exit::HELP)
}

/// Examples of `rdmc serve`, and the exit codes.
pub(crate) fn of_serve() -> String {
    format!("{SERVE}\n{}", exit::HELP_OF_TWO)
}

/// Examples of `rdmc get`, and the exit codes.
pub(crate) fn of_get() -> String {
    format!("{GET}\n{}", exit::HELP_OF_TWO)
}

/// Examples of `rdmc put`, and the exit codes.
pub(crate) fn of_put() -> String {
    format!("{PUT}\n{}", exit::HELP_OF_TWO)
}

const SERVE: &str = "\
Examples:
  A directory for clients anywhere, at port 7471:
      rdmc serve /data --listen 0.0.0.0
  Clients with the key get and put files; data is encrypted:
      rdmc serve /data --listen 0.0.0.0 --writable --key site.key --encrypt
  Clients may also have it fetch files of node1:
      rdmc serve /data -l :7471 --writable --key site.key --fetch-from node1
";

const GET: &str = "\
Examples:
  A directory and a file of one host:
      rdmc get node2/images node2/labels.csv /data
  All that a host serves, at another port:
      rdmc get node2:7500 /data
  Over a path on which a policer admits 5 Gbit/s:
      rdmc get node2/model.bin /data --rate 5G --in-flight 512M
  From one server to another; the bytes do not come here:
      rdmc get --from node1/images --to node2/incoming
";

const PUT: &str = "\
Examples:
  A file, into the directory that a host serves:
      rdmc put model.bin node2
  A directory, into another one there:
      rdmc put images node2:7500/incoming
";

/// Examples of `rdmc gateway`, and the exit codes.
pub(crate) fn of_gateway() -> String {
    format!("{GATEWAY}\n{}", exit::HELP_OF_TWO)
}

const SEND: &str = "\
Examples:
  A file to two receivers, at port 7471:
      rdmc send model.bin --to 10.0.0.2,10.0.0.3
  A directory and a file; one of the receivers listens at another port:
      rdmc send images/ labels.csv --to node2,node3:7500
  The network ports of all hosts have 10 Gbit/s:
      rdmc send model.bin --to node2,node3 --port-rate 10G
  Only peers with the key take part, and the data is encrypted:
      rdmc send model.bin --to node2,node3 --key cluster.key --encrypt
";

const RECV: &str = "\
Examples:
  From any host, at port 7471, into /data, until a signal comes:
      rdmc recv --listen 0.0.0.0 --dir /data
  One transfer, from this host only:
      rdmc recv --once
  At one address and another port, at most 10 GiB for each transfer:
      rdmc recv --listen 10.0.0.2:7500 --dir /data --max-size 10GiB
  Only from senders with the key, which send encrypted data:
      rdmc recv --listen 0.0.0.0 --dir /data --key cluster.key --encrypt
";

const GATEWAY: &str = "\
Examples:
  The exit, near the targets, for entrances with the key:
      rdmc gateway --serve 0.0.0.0 --allow 10.2.0.0/16 --key gateway.key
  The entrance, near the programs, which ask for targets by SOCKS5:
      rdmc gateway --listen 127.0.0.1:1080 --peer far --socks --key gateway.key
  An entrance whose connections all lead to one server:
      rdmc gateway --listen 10.1.0.1:873 --peer far --to 10.2.0.9:873
  On a path that a policer limits to 5 Gbit/s:
      rdmc gateway --listen 10.1.0.1:873 --peer far --to store:873 --rate 5G
  A gateway between, which passes connections on to the one at far:
      rdmc gateway --serve 0.0.0.0 --via far --key gateway.key
  An entrance that takes connections which the kernel diverts (TPROXY):
      rdmc gateway --listen 0.0.0.0 --peer far --transparent
";

/// Examples of `rdmc demo`.
pub(crate) const DEMO: &str = "\
Examples:
  64 MiB to seven receivers, each with a port of 1 Gbit/s:
      rdmc demo
  A chain of 16 members, with slower ports:
      rdmc demo --nodes 16 --algorithm chain --size 16MiB --port-rate 200M
  A file, as fast as this host copies it:
      rdmc demo --file disk.img --port-rate none";

/// Examples of `rdmc bench`.
pub(crate) const BENCH: &str = "\
Examples:
  One message of 64 MiB to three receivers:
      rdmc bench --nodes 4 --size 64M
  Two fabrics and two algorithms: four configurations:
      rdmc bench -n 4 -s 1M --fabric shm,tcp --algorithm chain,binomial-pipeline
  The same work by Open MPI, in turn:
      rdmc bench -n 4 -s 1,1M --vs ompi
  Is the cost model's choice the fastest one?
      rdmc bench -n 8 -s 1M,64M --explain";

/// Examples of `rdmc bench flows`.
pub(crate) const FLOWS: &str = "\
Examples:
  Short writes that poll, beside long sends that wait for events:
      rdmc bench flows --flow write:64:poll --flow send:1M
  The same between two hosts; the other one runs the first line:
      rdmc bench flows --listen 0.0.0.0:7472
      rdmc bench flows -f write:64:poll -f send:1M --to node2:7472
  Reads with 16 under way, in shared memory, each end on its own core:
      rdmc bench flows -f read:64k:depth=16:core=0:far-core=1 --fabric shm";

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, command};

    #[test]
    fn every_example_is_a_valid_command_line() {
        for (name, examples) in [
            ("send", super::SEND),
            ("recv", super::RECV),
            ("serve", super::SERVE),
            ("get", super::GET),
            ("put", super::PUT),
            ("gateway", super::GATEWAY),
            ("demo", super::DEMO),
            ("bench", super::BENCH),
            ("bench flows", super::FLOWS),
        ] {
            let typed = examples.lines().filter_map(|line| line.strip_prefix("      "));
            let mut count = 0;
            for line in typed {
                assert!(line.starts_with(&format!("rdmc {name}")), "{line}");
                Cli::read_from(command(), line.split_whitespace()).unwrap_or_else(|error| panic!("{line}: {error}"));
                count += 1;
            }
            assert!(count > 1, "{name}");
            assert!(examples.lines().all(|line| line.chars().count() <= 80), "{name}");
        }
    }
}
