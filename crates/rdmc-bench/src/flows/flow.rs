//! One flow, as the command line and the processes name it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rdmc::CompletionMode;
use rdmc_fabric::{FlowSpec, FlowVerb};
use rdmc_files::size::{self, ByteSize};
use serde::{Deserialize, Serialize};

use crate::options::Completion;

/// A flow: `VERB:SIZE[:OPTION…]`, such as `write:1M:poll:depth=4`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Flow {
    pub(crate) verb: FlowVerb,
    pub(crate) bytes: u64,
    pub(crate) completion: Completion,
    /// Messages under way at once.
    pub(crate) depth: u32,
    /// Receives that are posted ahead; `None` for one more than the depth.
    pub(crate) receives: Option<u32>,
    /// Whether the device gets the bytes with the request.
    pub(crate) inline: bool,
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    /// The core of the end that posts.
    pub(crate) core: Option<usize>,
    /// The core of the other end.
    pub(crate) far_core: Option<usize>,
}

impl Flow {
    /// Returns what the engine posts.
    pub(crate) fn spec(&self) -> FlowSpec {
        FlowSpec {
            verb: self.verb,
            bytes: usize::try_from(self.bytes).expect("at most 1 GiB"),
            in_flight: self.depth,
            receives: self.receives.unwrap_or(self.depth + 1),
        }
    }

    /// Returns how both ends wait.
    pub(crate) fn mode(&self) -> CompletionMode {
        self.completion.into()
    }

    /// Returns how long no message may be complete: ten seconds, and one more for each 5 MB under way.
    pub(crate) fn stall_limit(&self) -> Duration {
        Duration::from_secs(10 + self.bytes * u64::from(self.depth) / 5_000_000)
    }

    /// Names an option that only devices have, if the flow has one.
    pub(crate) fn device_option(&self) -> Option<&'static str> {
        let options = [(self.inline, "inline"), (self.service_level > 0, "sl"), (self.traffic_class > 0, "tc")];
        options.into_iter().find_map(|(given, name)| given.then_some(name))
    }

    /// Names an option that processes have and the model has not, if the flow has one.
    pub(crate) fn process_option(&self) -> Option<&'static str> {
        let options = [
            (self.core.is_some(), "core"),
            (self.far_core.is_some(), "far-core"),
            (self.completion == Completion::Hybrid, "hybrid"),
        ];
        options.into_iter().find_map(|(given, name)| given.then_some(name))
    }
}

impl FromStr for Flow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(':');
        let verb = words.next().and_then(|name| VERBS.into_iter().find(|(_, of)| *of == name));
        let (Some((verb, _)), Some(size)) = (verb, words.next()) else {
            let verbs = VERBS.map(|(_, name)| name).join(", ");
            return Err(format!(
                "{text:?} is no flow: give a verb ({verbs}) and a size, such as write:1M or send:64k:poll"
            ));
        };
        let bytes = size::parse(size)?;
        if !(1..=BYTES_MAX).contains(&bytes) {
            return Err(format!("{}: a message has 1 byte to {}", ByteSize(bytes), ByteSize(BYTES_MAX)));
        }
        let mut flow = Self {
            verb,
            bytes,
            completion: Completion::Event,
            depth: 1,
            receives: None,
            inline: false,
            service_level: 0,
            traffic_class: 0,
            core: None,
            far_core: None,
        };
        for word in words {
            flow.set(word)?;
        }
        if flow.receives.is_some() && !verb.takes_receives() {
            return Err(format!("{text:?}: only send and write-imm take receives"));
        }
        if flow.inline && verb == FlowVerb::Read {
            return Err(format!("{text:?}: a read sends no bytes inline"));
        }
        if flow.inline && bytes > INLINE_MAX {
            return Err(format!("{text:?}: at most {} are inline", ByteSize(INLINE_MAX)));
        }
        Ok(flow)
    }
}

impl Flow {
    fn set(&mut self, word: &str) -> Result<(), String> {
        if let Some(completion) = Completion::ALL.into_iter().find(|completion| completion.name() == word) {
            self.completion = completion;
            return Ok(());
        }
        if word == "inline" {
            self.inline = true;
            return Ok(());
        }
        let number = |value: &str, least: u32, most: u32| {
            let number = value.parse().ok().filter(|number| (least..=most).contains(number));
            number.ok_or_else(|| format!("{word:?}: give a number from {least} to {most}"))
        };
        let byte = |value, most| number(value, 0, most).map(|number| u8::try_from(number).unwrap_or(u8::MAX));
        let core = |value| number(value, 0, CORE_MAX).map(|core| usize::try_from(core).ok());
        match word.split_once('=') {
            Some(("depth", value)) => self.depth = number(value, 1, DEPTH_MAX)?,
            Some(("receives", value)) => self.receives = Some(number(value, 1, DEPTH_MAX)?),
            Some(("sl", value)) => self.service_level = byte(value, 15)?,
            Some(("tc", value)) => self.traffic_class = byte(value, 255)?,
            Some(("core", value)) => self.core = core(value)?,
            Some(("far-core", value)) => self.far_core = core(value)?,
            _ => return Err(format!("{word:?} is no option of a flow: {OPTIONS}")),
        }
        Ok(())
    }
}

impl fmt::Display for Flow {
    /// Writes what differs from the default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = VERBS.into_iter().find(|(verb, _)| *verb == self.verb).map_or("", |(_, name)| name);
        write!(f, "{verb}:{}", short(self.bytes))?;
        if self.completion != Completion::Event {
            write!(f, ":{}", self.completion.name())?;
        }
        if self.inline {
            f.write_str(":inline")?;
        }
        let numbers = [
            ("depth", (self.depth > 1).then_some(self.depth.into())),
            ("receives", self.receives.map(u64::from)),
            ("sl", (self.service_level > 0).then_some(self.service_level.into())),
            ("tc", (self.traffic_class > 0).then_some(self.traffic_class.into())),
            ("core", self.core.map(|core| core as u64)),
            ("far-core", self.far_core.map(|core| core as u64)),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                write!(f, ":{name}={number}")?;
            }
        }
        Ok(())
    }
}

impl From<Flow> for String {
    fn from(flow: Flow) -> Self {
        flow.to_string()
    }
}

impl TryFrom<String> for Flow {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Writes a size as it is typed: `64k`.
fn short(bytes: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "k")];
    let unit = units.into_iter().find(|(shift, _)| bytes >> shift > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

/// The verbs and their names.
const VERBS: [(FlowVerb, &str); 4] = [
    (FlowVerb::Send, "send"),
    (FlowVerb::Write, "write"),
    (FlowVerb::WriteWithImm, "write-imm"),
    (FlowVerb::Read, "read"),
];
const OPTIONS: &str = "event, poll or hybrid, depth=N, receives=N, inline, sl=N, tc=N, core=N, far-core=N";
/// Greatest length of a message in bytes.
const BYTES_MAX: u64 = 1 << 30;
/// Greatest number of messages or receives at once.
const DEPTH_MAX: u32 = 1024;
/// Greatest length of a message that is sent inline, in bytes; devices offer less.
const INLINE_MAX: u64 = 4 << 10;
const CORE_MAX: u32 = 1023;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_what_its_text_says() {
        let flow: Flow = "write:1M:poll:depth=4".parse().unwrap();
        assert_eq!(
            (flow.verb, flow.bytes, flow.completion, flow.depth),
            (FlowVerb::Write, 1 << 20, Completion::Poll, 4)
        );
        assert_eq!(flow.spec(), FlowSpec { verb: FlowVerb::Write, bytes: 1 << 20, in_flight: 4, receives: 5 });
        for text in [
            "send:1G",
            "write-imm:10:poll:receives=7",
            "read:1500:hybrid:depth=1024",
            "write:64:inline:sl=3:tc=96:core=0:far-core=1",
        ] {
            assert_eq!(text.parse::<Flow>().unwrap().to_string(), text);
            let json = serde_json::to_string(&text.parse::<Flow>().unwrap()).unwrap();
            assert_eq!(serde_json::from_str::<Flow>(&json).unwrap().to_string(), text);
        }
        assert_eq!("send:1024k:event:depth=1".parse::<Flow>().unwrap().to_string(), "send:1M");
    }

    #[test]
    fn what_is_no_flow_is_refused_with_the_remedy() {
        for (text, remedy) in [
            ("", "write-imm"),
            ("put:1M", "write-imm"),
            ("write", "such as"),
            ("write:many", "256MiB"),
            ("write:0", "1 byte to 1 GiB"),
            ("write:2G", "1 byte to 1 GiB"),
            ("write:1M:fast", "far-core=N"),
            ("write:1M:depth=0", "1 to 1024"),
            ("write:1M:depth=4294967297", "1 to 1024"),
            ("write:1M:sl=16", "0 to 15"),
            ("write:1M:receives=2", "only send"),
            ("read:1:inline", "no bytes inline"),
            ("send:64k:inline", "4 KiB"),
        ] {
            let error = text.parse::<Flow>().unwrap_err();
            assert!(error.contains(remedy), "{text}: {error}");
        }
    }
}
