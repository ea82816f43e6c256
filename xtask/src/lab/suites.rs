//! What `cargo xtask lab test` runs: one table.

use super::Driver;

/// Commands that run together in one machine and pass if they end with status 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suite {
    /// What the filter and the summary call it.
    pub(crate) name: &'static str,
    /// Whether it runs when no filter is given.
    pub(crate) by_default: bool,
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
    /// just built: `{test:DIR/NAME}` an integration test of the package in the directory DIR, `{lib:NAME}` the tests of a
    /// library, `{bin:NAME}` and `{example:NAME}` programs.
    pub(crate) command: &'static [&'static str],
}

// ------------------------------------------------------------------------------------------------------------ the table

/// The suites, in the order in which they begin: two that tell at once if devices work, then long ones before short ones.
pub(crate) const SUITES: &[Suite] = &[
    // Every node's device is there, and its port is up.
    Suite {
        name: "devices",
        nodes: 3,
        timeout_s: 60,
        command: &["sh", "-c", r#"ibv_devinfo; test "$(ibv_devinfo | grep -c PORT_ACTIVE)" = "$RDMC_LAB_NODES""#],
        ..RXE
    },
    // Messages of 64 KiB pass between two nodes, both sides waiting for events.
    Suite {
        name: "perftest",
        timeout_s: 60,
        command: &[
            "sh",
            "-ec",
            "measure() { ib_send_bw -F -e -s 65536 -n 1000 -x 1 -d \"$@\"; }
             measure rxe1 & server=$!
             until ss -Hltn sport = :18515 | grep -q .; do kill -0 $server; done
             measure rxe2 127.0.0.1
             wait $server",
        ],
        ..RXE
    },
    // Processes: the program on devices, and what goes wrong between them. They stand for hosts, and share no memory.
    Suite {
        name: "program",
        nodes: 8,
        memory_mib: 3072,
        timeout_s: 600,
        builds: &[WORKSPACE],
        command: &[
            "env",
            "RDMC_NO_SHM=1",
            "RDMC_TEST_REQUIRE=rdma",
            "RDMC_TEST_PROGRAM={bin:rdmc}",
            "{test:integration-tests/suite}",
            "--test-threads",
            "1",
            "--nocapture",
            "lab::",
        ],
        ..RXE
    },
    Suite {
        name: "async-rdma",
        nodes: 4,
        memory_mib: 2048,
        timeout_s: 600,
        builds: &[&["test", "--locked", "--manifest-path", "crates/rdmc-async-rdma/Cargo.toml", "--tests"]],
        command: &[
            "sh",
            "-c",
            "failed=
             for test in {test:rdmc-async-rdma/conformance} {test:rdmc-async-rdma/multicast} \\
                     {test:rdmc-async-rdma/peers}; do
                 $test --test-threads 1 --nocapture || failed=1
             done
             test -z \"$failed\"",
        ],
        ..RXE
    },
    Suite {
        name: "verbs-conformance",
        builds: &[WORKSPACE],
        command: &["{test:rdmc-verbs/suite}", "--test-threads", "1", "conformance::"],
        ..RXE
    },
    // What the fabric does when links and limits fail it.
    Suite {
        name: "verbs-lab",
        nodes: 3,
        builds: &[WORKSPACE],
        command: &["{test:rdmc-verbs/suite}", "--test-threads", "1", "--nocapture", "lab::"],
        ..RXE
    },
    // Groups in one process.
    Suite {
        name: "groups",
        nodes: 4,
        memory_mib: 2048,
        timeout_s: 600,
        builds: &[WORKSPACE],
        command: &[
            "env",
            "RDMC_TEST_FABRICS=verbs",
            "{test:integration-tests/suite}",
            "--test-threads",
            "1",
            "multicast::",
            "failure::",
        ],
        ..RXE
    },
    // Sessions in one process, between two devices.
    Suite {
        name: "sessions",
        builds: &[WORKSPACE],
        command: &[
            "env",
            "RDMC_TEST_REQUIRE=rdma",
            "{test:integration-tests/suite}",
            "--test-threads",
            "1",
            "sessions::verbs::",
        ],
        ..RXE
    },
    // The same between distant devices: over several queue pairs, at a rate that the session finds.
    Suite {
        name: "sessions-far",
        builds: &[WORKSPACE],
        command: &[
            "sh",
            "-ec",
            "for device in lo veth1 veth2; do
                 tc qdisc replace dev $device root netem delay 3ms limit 100000
             done
             RDMC_TEST_REQUIRE=rdma {test:integration-tests/suite} --test-threads 1 --nocapture sessions::verbs::",
        ],
        ..RXE
    },
    // The fabric's own tests, that of its layouts against the headers of libibverbs included.
    Suite { name: "verbs-lib", builds: &[WORKSPACE], command: &["{lib:rdmc_verbs}", "--test-threads", "1"], ..RXE },
    // What iWARP can do for us: be refused with the reason.
    Suite {
        name: "siw",
        by_default: false,
        driver: Driver::Siw,
        timeout_s: 60,
        builds: &[WORKSPACE],
        command: &[
            "sh",
            "-c",
            "ibv_devinfo | grep -E 'hca_id|transport'
             said=$({bin:rdmc} demo --nodes 2 --size 1MiB --fabric verbs --device siw1 2>&1); status=$?
             echo \"$said\"
             test $status = 2 && case $said in *iWARP*) ;; *) exit 1 ;; esac",
        ],
        ..RXE
    },
];

/// What `cargo test --workspace` builds too: another selection of packages would compile most of them again.
const WORKSPACE: &[&str] = &["test", "--locked", "--workspace"];

/// What most suites have in common.
const RXE: Suite = Suite {
    name: "",
    by_default: true,
    nodes: 2,
    driver: Driver::Rxe,
    memory_mib: 1024,
    timeout_s: 300,
    builds: &[],
    command: &[],
};
