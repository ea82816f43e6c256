//! The results of the demo: a table for people, objects for programs.

use std::fmt::Write;

use rdmc::Algorithm;
use rdmc_files::size::{ByteSize, Rate};
use rdmc_files::words::count;
use rdmc_schedule::{BlockCount, Schedule};
use serde::Serialize;

/// What all rounds have in common.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DemoSetting {
    pub(crate) fabric: &'static str,
    /// The RDMA devices in use.
    pub(crate) devices: Vec<String>,
    /// The rate of each member's emulated port; none if there are no such ports.
    pub(crate) port_rate: Option<String>,
    pub(crate) members: u32,
    pub(crate) bytes: u64,
    pub(crate) block_size: u32,
    pub(crate) cores: usize,
}

/// The measurements of one round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RoundResult {
    pub(crate) algorithm: String,
    /// From the start of the send to the last receiver's last byte.
    pub(crate) seconds: f64,
    /// From the start of the send to each receiver's last byte.
    pub(crate) seconds_of_receivers: Vec<f64>,
    /// From the first receiver's last byte to the last one's.
    pub(crate) skew_seconds: f64,
    /// Processor time of all members together.
    pub(crate) cpu_seconds: f64,
    pub(crate) digests_ok: usize,
    /// Corrupted blocks that were fetched again.
    pub(crate) blocks_healed: u64,
}

/// A round as programs read it.
#[derive(Serialize)]
#[serde(tag = "event", rename = "round")]
pub(crate) struct RoundEvent<'a> {
    #[serde(flatten)]
    pub(crate) setting: &'a DemoSetting,
    #[serde(flatten)]
    pub(crate) measured: &'a RoundResult,
    /// Bytes of the object over the mean of the receivers' times.
    pub(crate) bytes_per_second_per_receiver: f64,
    pub(crate) bytes_per_second_aggregate: f64,
    /// Per GiB delivered to one receiver; `None` if nothing was delivered.
    pub(crate) cpu_seconds_per_gib: Option<f64>,
    pub(crate) steps: u64,
}

impl DemoSetting {
    /// Returns the number of receivers.
    pub(crate) fn receivers(&self) -> u32 {
        self.members - 1
    }

    /// Returns the number of steps of a schedule for this object.
    pub(crate) fn steps(&self, algorithm: &Algorithm) -> u64 {
        let blocks = self.bytes.div_ceil(u64::from(self.block_size)).clamp(1, u64::from(u32::MAX));
        let blocks = BlockCount(u32::try_from(blocks).unwrap_or(u32::MAX));
        Schedule::new(algorithm, self.members, blocks).map_or(0, |schedule| schedule.steps())
    }

    /// Describes a round for programs.
    pub(crate) fn event<'a>(&'a self, measured: &'a RoundResult, algorithm: &Algorithm) -> RoundEvent<'a> {
        RoundEvent {
            setting: self,
            measured,
            bytes_per_second_per_receiver: self.rate_per_receiver(measured).per_second(),
            bytes_per_second_aggregate: self.aggregate(measured).per_second(),
            cpu_seconds_per_gib: self.cpu_per_gib(measured),
            steps: self.steps(algorithm),
        }
    }

    /// Returns the bytes of the object over the mean of the receivers' times.
    fn rate_per_receiver(&self, measured: &RoundResult) -> Rate {
        let mean = measured.seconds_of_receivers.iter().sum::<f64>() / f64::from(self.receivers().max(1));
        Rate { bytes: self.bytes, seconds: mean }
    }

    /// Returns the object's bytes over the time until the last receiver has them.
    fn rate(&self, measured: &RoundResult) -> Rate {
        Rate { bytes: self.bytes, seconds: measured.seconds }
    }

    fn aggregate(&self, measured: &RoundResult) -> Rate {
        let delivered = self.bytes.saturating_mul(u64::from(self.receivers()));
        Rate { bytes: delivered, seconds: measured.seconds }
    }

    #[expect(clippy::cast_precision_loss, reason = "a ratio to be displayed")]
    fn cpu_per_gib(&self, measured: &RoundResult) -> Option<f64> {
        let delivered = self.bytes.saturating_mul(u64::from(self.receivers()));
        (delivered > 0).then(|| measured.cpu_seconds / (delivered as f64 / GIB))
    }

    /// Draws the table.
    pub(crate) fn table(&self, rounds: &[RoundResult]) -> String {
        let receivers = self.receivers();
        let place = match self.fabric {
            "mem" => "mem, inside one process".to_owned(),
            "tcp" => "tcp on loopback".to_owned(),
            other => format!("{other} by {}", self.devices.join(", ")),
        };
        let mut text = format!(
            "{} (1 sender, {}), {}, {place}, blocks of {}",
            count(self.members, "member"),
            count(receivers, "receiver"),
            ByteSize(self.bytes),
            ByteSize(self.block_size.into()),
        );
        let _ = match &self.port_rate {
            Some(rate) => writeln!(text, ", a port of {rate} for each member"),
            None => writeln!(text),
        };
        let width = rounds.iter().map(|round| round.algorithm.len()).max().unwrap_or(0);
        let mut line = |cells: [&str; 7]| {
            let [name, time, each, all, skew, cpu, digests] = cells;
            let _ =
                writeln!(text, "  {name:width$}  {time:>9}  {each:>12}  {all:>11}  {skew:>9}  {cpu:>9}  {digests:>11}");
        };
        line(["", "time", "to each", "to all", "skew", "CPU s/GiB", "digests"]);
        for round in rounds {
            line([
                &round.algorithm,
                &seconds(round.seconds),
                &self.rate(round).to_string(),
                &self.aggregate(round).to_string(),
                &seconds(round.skew_seconds),
                &self.cpu_per_gib(round).map_or("-".to_owned(), |cpu| format!("{cpu:.2}")),
                &format!("{} of {receivers} ok", round.digests_ok),
            ]);
        }
        for round in rounds.iter().filter(|round| round.blocks_healed > 0) {
            let (blocks, were) =
                (count(round.blocks_healed, "block"), if round.blocks_healed == 1 { "was" } else { "were" });
            let _ = writeln!(text, "  {}: {blocks} came corrupted and {were} healed", round.algorithm);
        }
        text
    }

    /// Explains the numbers, and what they do not show.
    pub(crate) fn remark(&self, rounds: &[RoundResult], algorithm: &Algorithm) -> String {
        let (steps, sequential) = (self.steps(algorithm), self.steps(&Algorithm::Sequential));
        let compares = steps > 0 && *algorithm != Algorithm::Sequential;
        let steps_told = format!("{} of one block instead of {sequential}", count(steps, "step"));
        if let Some(rate) = &self.port_rate {
            let here = format!(
                "All members run on this host. The demo lets each send at most {rate}, like a port of its own (--port-rate)."
            );
            return match rounds {
                [ours, alone] if compares && ours.seconds > 0.0 => {
                    let gain = alone.seconds / ours.seconds;
                    let (ours, alone) = (&ours.algorithm, &alone.algorithm);
                    format!("{here}\n{ours} was {gain:.1} times as fast as {alone}: {steps_told}.")
                }
                _ => here,
            };
        }
        let here = match self.devices.len() {
            0 => {
                let cores = count(self.cores, "core");
                format!("All members share {cores} of this host: copying sets the time more than the schedule does.")
            }
            // The processor or an adapter moves the bytes, depending on the device.
            _ => "All members share the devices and the memory of this host: on a network times differ.".to_owned(),
        };
        if compares { format!("{here}\nOn ports of their own {algorithm} takes {steps_told}.") } else { here }
    }
}

/// Formats seconds.
fn seconds(seconds: f64) -> String {
    if seconds < 0.0995 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(members: u32, bytes: u64) -> DemoSetting {
        DemoSetting {
            fabric: "tcp",
            devices: Vec::new(),
            port_rate: None,
            members,
            bytes,
            block_size: 1 << 20,
            cores: 2,
        }
    }

    fn round(algorithm: &str, seconds: f64) -> RoundResult {
        RoundResult {
            algorithm: algorithm.into(),
            seconds,
            seconds_of_receivers: vec![seconds / 2.0; 7],
            skew_seconds: 0.012,
            cpu_seconds: 1.75,
            digests_ok: 7,
            blocks_healed: 0,
        }
    }

    /// The time of the last receiver counts: it is what the user waits for.
    #[test]
    fn the_table_shows_time_rates_skew_and_processor_time() {
        let expected = "\
8 members (1 sender, 7 receivers), 256 MiB, tcp on loopback, blocks of 1 MiB
                          time       to each       to all       skew  CPU s/GiB      digests
  binomial-pipeline     0.50 s     512 MiB/s    3.5 GiB/s    12.0 ms       1.00    7 of 7 ok
";
        assert_eq!(setting(8, 256 << 20).table(&[round("binomial-pipeline", 0.5)]), expected);
        let limited = DemoSetting { port_rate: Some("1 Gbit/s".into()), ..setting(8, 256 << 20) };
        let first = limited.table(&[]);
        assert!(
            first.starts_with("8 members") && first.contains("blocks of 1 MiB, a port of 1 Gbit/s for each member\n")
        );
    }

    #[test]
    fn the_remark_names_the_gain_in_time_and_in_steps() {
        let limited = DemoSetting { port_rate: Some("1 Gbit/s".into()), ..setting(8, 256 << 20) };
        let rounds = [round("binomial-pipeline", 0.5), round("sequential", 3.4)];
        let remark = limited.remark(&rounds, &Algorithm::BinomialPipeline);
        assert!(remark.contains("at most 1 Gbit/s"), "{remark}");
        let gain = "binomial-pipeline was 6.8 times as fast as sequential: 258 steps of one block instead of 1792.";
        assert!(remark.ends_with(gain), "{remark}");
    }

    #[test]
    fn the_remark_says_what_the_members_share() {
        let copied = setting(8, 256 << 20);
        let remark =
            |setting: &DemoSetting| setting.remark(&[round("a", 1.0), round("b", 2.0)], &Algorithm::BinomialPipeline);
        let shared = remark(&copied);
        assert!(shared.starts_with("All members share 2 cores of this host: copying sets the time"), "{shared}");
        assert!(!shared.contains("as fast as"), "there are no ports to compare: {shared}");
        let by_devices = DemoSetting { fabric: "verbs", devices: vec!["rxe1".into()], ..copied };
        let remark = remark(&by_devices);
        assert!(remark.starts_with("All members share the devices and the memory of this host"), "{remark}");
        assert!(!remark.contains("copying") && !remark.contains("cores"), "{remark}");
    }

    #[test]
    fn one_member_and_no_bytes_are_no_division_by_zero() {
        let setting = setting(1, 0);
        let measured = RoundResult {
            algorithm: "chain".into(),
            seconds: 0.0,
            seconds_of_receivers: Vec::new(),
            skew_seconds: 0.0,
            cpu_seconds: 0.1,
            digests_ok: 0,
            blocks_healed: 0,
        };
        assert!(setting.table(std::slice::from_ref(&measured)).contains("0 of 0 ok"));
        assert!(setting.remark(std::slice::from_ref(&measured), &Algorithm::Chain).ends_with('.'));
        assert!(setting.event(&measured, &Algorithm::Chain).cpu_seconds_per_gib.is_none());
    }
}
