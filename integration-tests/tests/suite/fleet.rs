//! Runs a sender and its receivers as processes, and judges their ends after one of them came to harm.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::pattern;
use crate::program::{comes_true, command_in, signal, tree, wait_until};

/// The place of a process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    /// The network namespace; `None` for that of the tests.
    pub(crate) namespace: Option<String>,
    /// The address in that namespace.
    pub(crate) address: Option<String>,
}

/// The processes of one transfer, the sender first: node 0 of its cluster.
pub(crate) struct Fleet {
    pub(crate) members: Vec<Member>,
}

/// One process.
pub(crate) struct Member {
    child: Child,
    /// The address at which it listens.
    address: String,
    /// The directory into which it receives.
    dir: TempDir,
    /// The events that it has printed.
    said: Arc<Mutex<Vec<Value>>>,
}

/// The end of a process, and the files that it left.
pub(crate) struct End {
    status: ExitStatus,
    address: String,
    /// The failure that it printed.
    message: String,
    dir: TempDir,
}

impl Fleet {
    /// Starts to send a file from the first host to the others. Returns when all take part, or some have ended.
    pub(crate) fn start(hosts: &[Host], file: &Path, options: &[&str]) -> Self {
        let mut members: Vec<Member> = Vec::new();
        for host in &hosts[1..] {
            let listen = host.address.as_deref().unwrap_or("127.0.0.1:0");
            let dir = TempDir::new().unwrap();
            let path = dir.path().to_owned();
            let arguments = ["recv", "--once", "--json", "--listen", listen, "--dir"].map(OsStr::new);
            members.push(Member::start(host, arguments.into_iter().chain([path.as_os_str()]).collect(), dir));
        }
        for member in &mut members {
            wait_until("a receiver listens", || member.event("listening").is_some());
            member.address = member.event("listening").unwrap()["address"].as_str().unwrap().to_owned();
        }
        let to = members.iter().map(|member| member.address.as_str()).collect::<Vec<_>>().join(",");
        // The first failure ends the transfer for all. Other tests cover recovery.
        let arguments = ["send", "--json", "--on-failure", "fail", "--to", &to]
            .into_iter()
            .chain(options.iter().copied())
            .map(OsStr::new);
        let arguments = arguments.chain([file.as_os_str()]).collect();
        members.insert(0, Member::start(&hosts[0], arguments, TempDir::new().unwrap()));
        let mut fleet = Self { members };
        wait_until("all take part", || {
            // In this order: a process may start and end in between.
            let ended = fleet.members.iter_mut().any(|member| member.child.try_wait().unwrap().is_some());
            let begun = fleet.members.iter().all(|member| member.event("started").is_some());
            assert!(begun || !ended, "a process ended before all had started:\n{}", fleet.said());
            begun
        });
        fleet
    }

    /// Lists what the processes have said.
    fn said(&self) -> String {
        let said = self.members.iter().enumerate().map(|(number, member)| {
            let events = member.said.lock().unwrap();
            format!("{number}: {}\n", events.iter().map(Value::to_string).collect::<Vec<_>>().join(" "))
        });
        said.collect()
    }

    /// Waits until all processes except these have ended.
    pub(crate) fn wait_but(&mut self, others: &BTreeSet<usize>) {
        for number in 0..self.members.len() {
            let child = &mut self.members[number].child;
            let ends = others.contains(&number) || comes_true(|| child.try_wait().unwrap().is_some());
            assert!(ends, "process {number} does not end:\n{}", self.said());
        }
    }

    /// Waits until all processes have ended, and returns how.
    pub(crate) fn end(mut self) -> Vec<End> {
        self.wait_but(&BTreeSet::new());
        let ends = self.members.into_iter().map(|mut member| {
            let status = member.child.wait().unwrap();
            // The reader soon reaches the end of the pipe of an ended process.
            wait_until("all is read", || Arc::strong_count(&member.said) == 1);
            let message = member.event("failed").map(|event| event["message"].as_str().unwrap().to_owned());
            let dir = std::mem::replace(&mut member.dir, TempDir::new().unwrap());
            End { status, address: member.address.clone(), message: message.unwrap_or_default(), dir }
        });
        ends.collect()
    }
}

impl Member {
    fn start(host: &Host, arguments: Vec<&OsStr>, dir: TempDir) -> Self {
        let mut command = command_in(host.namespace.as_deref(), &arguments);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let (lines, heard) = (BufReader::new(child.stdout.take().unwrap()).lines(), said.clone());
        std::thread::spawn(move || {
            // A killed process may leave half a line.
            let events = lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
            events.for_each(|event| heard.lock().unwrap().push(event));
        });
        Self { child, address: String::new(), dir, said }
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    fn event(&self, name: &str) -> Option<Value> {
        self.said.lock().unwrap().iter().find(|event| event["event"] == name).cloned()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl End {
    pub(crate) fn closed_well(&self) -> bool {
        self.status.success()
    }

    /// Returns the processes that the failure names, in the words of process `by`.
    fn named(&self, by: usize, ends: &[Self]) -> BTreeSet<usize> {
        let names = |number: usize| match (by, number) {
            (_, 0) => "the sender".to_owned(),
            (0, _) => ends[number].address.clone(),
            _ => format!("receiver {number}"),
        };
        (0..ends.len()).filter(|&number| self.message.contains(&names(number))).collect()
    }
}

/// Judges a round, and returns whether all went well.
///
/// All survivors have the file; or all have failed, name the same one of the victims, and leave nothing unfinished.
///
/// # Errors
/// The property that does not hold.
pub(crate) fn judge(ends: &[End], victims: &BTreeSet<usize>, file: &Path) -> Result<bool, String> {
    let source = tree(file.parent().unwrap());
    let survivors: Vec<_> = ends.iter().enumerate().filter(|(number, _)| !victims.contains(number)).collect();
    let told = || {
        let lines = ends.iter().enumerate().map(|(number, end)| format!("{number}: {}, {:?}", end.status, end.message));
        lines.collect::<Vec<_>>().join("\n")
    };
    let well = survivors.iter().all(|(_, end)| end.closed_well());
    if !well && survivors.iter().any(|(_, end)| end.closed_well()) {
        return Err(format!("some survivors were told another end:\n{}", told()));
    }
    let named: BTreeSet<_> = survivors.iter().map(|&(number, end)| end.named(number, ends)).collect();
    let right = |named: &BTreeSet<usize>| named.len() == 1 && named.is_subset(victims);
    let agree = named.len() == 1 && named.iter().all(right);
    if !well && !agree {
        return Err(format!("{named:?} is named, which is not one of {victims:?} by all:\n{}", told()));
    }
    if !well && ends.iter().any(End::closed_well) {
        return Err(format!("who was hit closed well, the others did not:\n{}", told()));
    }
    for (number, end) in ends.iter().enumerate().skip(1) {
        // A killed process cannot clean up.
        let killed = end.status.code().is_none();
        let left = tree(end.dir.path());
        let whole = left == source;
        if (end.closed_well() && !whole) || !(whole || left.is_empty() || killed) {
            return Err(format!("process {number} left {:?}:\n{}", left.keys(), told()));
        }
    }
    Ok(well)
}

/// Writes the file that is sent.
pub(crate) fn file(dir: &TempDir, bytes: usize) -> PathBuf {
    let path = dir.path().join("file");
    std::fs::write(&path, pattern(bytes, 5)).unwrap();
    path
}

/// Rounds, each drawn from its own seed.
pub(crate) struct Campaign {
    name: &'static str,
    rounds: u64,
    seed: u64,
}

impl Campaign {
    /// Takes the number of rounds from the variable `name`, and the seed of the first round from `name` with `_SEED`.
    ///
    /// Without the second variable, each run has another seed.
    pub(crate) fn of(name: &'static str, rounds: u64) -> Self {
        let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let seed = number(&format!("{name}_SEED")).unwrap_or(since.as_secs() << 16);
        Self { name, rounds: number(name).unwrap_or(rounds), seed }
    }

    /// Plays the rounds, and counts their outcomes.
    ///
    /// Rounds mostly wait, so a long campaign plays several at once, each in a lane of its own: a number below `lanes`,
    /// which `round` gets before the seed. A short one plays them in lane 0, one after the other.
    ///
    /// # Panics
    /// After all rounds, if one has failed.
    pub(crate) fn play(&self, lanes: usize, round: impl Fn(usize, u64) -> Result<String, String> + Sync) {
        let (next, tally) = (AtomicU64::new(self.seed), Mutex::new((0, BTreeMap::<String, u64>::new())));
        let play_lane = &|lane| loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.seed + self.rounds {
                break;
            }
            let played = catch_unwind(AssertUnwindSafe(|| round(lane, seed)));
            let played = played.unwrap_or_else(|_| Err("the round panicked or hung; see above".to_owned()));
            let (failed, counts) = &mut *tally.lock().unwrap();
            match played {
                Ok(what) => *counts.entry(what).or_default() += 1,
                Err(what) => {
                    *failed += 1;
                    eprintln!("seed {seed}: {what}\nreplay: {0}=1 {0}_SEED={seed}", self.name);
                }
            }
        };
        std::thread::scope(|scope| {
            (1..self.lanes(lanes)).for_each(|lane| drop(scope.spawn(move || play_lane(lane))));
            play_lane(0);
        });
        let (failed, counts) = tally.into_inner().unwrap();
        // Past the harness's capture: a proof records it.
        let line = format!("{} rounds from seed {}, {failed} failed: {counts:?}\n", self.rounds, self.seed);
        let _ = std::io::stdout().write_all(line.as_bytes());
        assert_eq!(failed, 0, "rounds that failed");
    }

    /// Returns how many of `lanes` this campaign uses.
    pub(crate) fn lanes(&self, lanes: usize) -> usize {
        if self.rounds < 10 { 1 } else { lanes }
    }
}

/// Numbers drawn from a seed.
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    /// Draws a number below a bound (splitmix64).
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// Draws a number from 0 up to 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        f64::from(u32::try_from(self.below(1 << 20)).unwrap()) / f64::from(1 << 20)
    }

    pub(crate) fn one_of<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}
