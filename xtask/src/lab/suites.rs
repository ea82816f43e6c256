//! What `cargo xtask lab test` runs: one table.

use super::Driver;

/// Commands that run together in one machine and pass if they end with status 0.
#[derive(Debug)]
pub(crate) struct Suite {
    /// What the filter and the summary call it.
    pub(crate) name: &'static str,
    /// Number of nodes.
    pub(crate) nodes: u8,
    /// What their devices are.
    pub(crate) driver: Driver,
    /// Memory of the machine.
    pub(crate) memory_mib: u32,
    /// Time limit in seconds.
    pub(crate) timeout_s: u32,
    /// What is built on the host before: arguments of `cargo`, which begin with `test` (`--no-run` is added) or `build`.
    pub(crate) builds: &'static [&'static [&'static str]],
    /// The command, run in the workspace's root directory. In each word `{KIND:NAME}` stands for the path of an executable
    /// just built: `{test:NAME}` an integration test, `{lib:NAME}` the tests of a library, `{bin:NAME}` and
    /// `{example:NAME}` programs.
    pub(crate) command: &'static [&'static str],
}

// ------------------------------------------------------------------------------------------------------------ the table

/// The suites, in the order in which they run.
pub(crate) const SUITES: &[Suite] = &[
    // Every node's device is there, and its port is up.
    Suite {
        name: "devices",
        nodes: 3,
        driver: Driver::Rxe,
        memory_mib: 512,
        timeout_s: 60,
        builds: &[],
        command: &["sh", "-c", r#"ibv_devinfo; test "$(ibv_devinfo | grep -c PORT_ACTIVE)" = "$RDMC_LAB_NODES""#],
    },
    // Messages of 64 KiB pass between two nodes, both sides waiting for events.
    Suite {
        name: "perftest",
        nodes: 2,
        driver: Driver::Rxe,
        memory_mib: 512,
        timeout_s: 60,
        builds: &[],
        command: &[
            "sh",
            "-ec",
            "measure() { ib_send_bw -F -e -s 65536 -n 1000 -x 1 -d \"$@\"; }
             measure rxe1 & server=$!
             until ss -Hltn sport = :18515 | grep -q .; do kill -0 $server; done
             measure rxe2 127.0.0.1
             wait $server",
        ],
    },
];
