//! Traces for [Perfetto](https://ui.perfetto.dev) and `chrome://tracing`: a process for each node, a track for each of
//! its ports.

use serde::Serialize;

use crate::log::Recorded;
use crate::simulation::NodeIndex;

/// Returns recorded events as a trace in Chrome's JSON format.
///
/// The name of a block is its immediate: the number of the block, or with a first block the message's size in payload
/// bytes. Blocks that share a port at the same time have rows of their own.
pub fn to_trace(recorded: &[Recorded]) -> String {
    let mut rows = Rows::default();
    let mut events: Vec<TraceEvent<'_>> = Vec::new();
    let mut transfers: Vec<_> = recorded.iter().filter(|what| matters(what)).collect();
    transfers.sort_by_key(|what| begin_of(what));
    for what in transfers {
        match *what {
            Recorded::Carried { from, to, imm, one_sided, bytes, begin_ns, end_ns, arrival_ns } => {
                let label = imm.map_or_else(|| "bytes".to_owned(), |imm| format!("imm {imm}"));
                let label = if one_sided { "one-sided".to_owned() } else { label };
                let facts = Facts { bytes, from: from.0, to: to.0 };
                let latency_ns = arrival_ns - end_ns;
                for (node, side, name, begin_ns, end_ns) in [
                    (from, Side::Out, format!("{label} → {to}"), begin_ns, end_ns),
                    (to, Side::In, format!("{label} ← {from}"), begin_ns + latency_ns, arrival_ns),
                ] {
                    let row = rows.place(node, side, begin_ns, end_ns);
                    events.push(TraceEvent::span(node, side.track(row), name, begin_ns, end_ns, Some(facts)));
                }
            }
            Recorded::HeldUp { node, begin_ns, duration_ns } => {
                let end_ns = begin_ns + duration_ns;
                events.push(TraceEvent::span(node, SOFTWARE_TRACK, "held up".to_owned(), begin_ns, end_ns, None));
            }
            Recorded::Fault { at_ns, node, what } => events.push(TraceEvent::instant(node, what, at_ns)),
        }
    }
    let mut named = rows.names();
    named.append(&mut events);
    let trace = Trace { display_time_unit: "ns", trace_events: named };
    serde_json::to_string(&trace).expect("plain values become JSON")
}

/// Returns whether the trace shows an event: the protocol's small writes would hide the blocks.
fn matters(what: &Recorded) -> bool {
    !matches!(what, Recorded::Carried { one_sided: true, bytes, .. } if *bytes <= PROTOCOL_BYTES)
}

fn begin_of(what: &Recorded) -> u64 {
    match what {
        Recorded::Carried { begin_ns, .. } | Recorded::HeldUp { begin_ns, .. } => *begin_ns,
        Recorded::Fault { at_ns, .. } => *at_ns,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Out,
    In,
}

impl Side {
    fn track(self, row: u32) -> u32 {
        match self {
            Self::Out => 100 + row,
            Self::In => 200 + row,
        }
    }
}

/// The rows of each port, and until when they are occupied.
#[derive(Default)]
struct Rows(std::collections::BTreeMap<(NodeIndex, Side), Vec<u64>>);

impl Rows {
    /// Returns a row that is free from `begin_ns`.
    fn place(&mut self, node: NodeIndex, side: Side, begin_ns: u64, end_ns: u64) -> u32 {
        let rows = self.0.entry((node, side)).or_default();
        let free = rows.iter().position(|&until_ns| until_ns <= begin_ns).unwrap_or_else(|| {
            rows.push(0);
            rows.len() - 1
        });
        rows[free] = end_ns;
        u32::try_from(free).unwrap_or(u32::MAX)
    }

    /// Names the nodes and their tracks.
    fn names<'a>(&self) -> Vec<TraceEvent<'a>> {
        let mut events = Vec::new();
        for (&(node, side), rows) in &self.0 {
            if side == Side::Out || !self.0.contains_key(&(node, Side::Out)) {
                events.push(TraceEvent::name("process_name", node, None, format!("node {node}")));
                events.push(TraceEvent::name("thread_name", node, Some(SOFTWARE_TRACK), "software".to_owned()));
            }
            for row in 0..u32::try_from(rows.len()).unwrap_or(u32::MAX) {
                let name = if side == Side::Out { "port out" } else { "port in" };
                let track = Some(side.track(row));
                events.push(TraceEvent::name("thread_name", node, track, name.to_owned()));
            }
        }
        events
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'a str,
    trace_events: Vec<TraceEvent<'a>>,
}

#[derive(Serialize)]
struct TraceEvent<'a> {
    name: std::borrow::Cow<'a, str>,
    ph: &'a str,
    /// In µs, with a fraction.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args>,
}

#[derive(Clone, Copy, Serialize)]
struct Facts {
    bytes: u64,
    from: u32,
    to: u32,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args {
    Facts(Facts),
    Name { name: String },
}

impl<'a> TraceEvent<'a> {
    fn span(node: NodeIndex, track: u32, name: String, begin_ns: u64, end_ns: u64, facts: Option<Facts>) -> Self {
        Self {
            name: name.into(),
            ph: "X",
            ts: micros(begin_ns),
            dur: Some(micros(end_ns - begin_ns)),
            pid: node.0,
            tid: track,
            s: None,
            args: facts.map(Args::Facts),
        }
    }

    fn instant(node: Option<NodeIndex>, what: &'a str, at_ns: u64) -> Self {
        let (pid, scope) = node.map_or((0, "g"), |node| (node.0, "p"));
        let ts = micros(at_ns);
        Self { name: what.into(), ph: "i", ts, dur: None, pid, tid: SOFTWARE_TRACK, s: Some(scope), args: None }
    }

    fn name(kind: &'a str, node: NodeIndex, track: Option<u32>, name: String) -> Self {
        let tid = track.unwrap_or(0);
        let args = Some(Args::Name { name });
        Self { name: kind.into(), ph: "M", ts: 0.0, dur: None, pid: node.0, tid, s: None, args }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a trace shows microseconds")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The track of a node's software.
const SOFTWARE_TRACK: u32 = 1;
/// Longest write in bytes that belongs to the protocol.
const PROTOCOL_BYTES: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_overlap_have_rows_of_their_own() {
        let carried = |imm, begin_ns, end_ns| Recorded::Carried {
            from: NodeIndex(0),
            to: NodeIndex(1),
            imm: Some(imm),
            one_sided: false,
            bytes: 1000,
            begin_ns,
            end_ns,
            arrival_ns: end_ns + 5,
        };
        let trace = to_trace(&[carried(0, 0, 100), carried(1, 50, 150), carried(2, 120, 200)]);
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let spans: Vec<_> = trace["traceEvents"].as_array().unwrap().iter().filter(|it| it["ph"] == "X").collect();
        let rows = |node| -> Vec<u64> {
            spans.iter().filter(|it| it["pid"] == node).map(|it| it["tid"].as_u64().unwrap()).collect()
        };
        assert_eq!((rows(0), rows(1)), (vec![100, 101, 100], vec![200, 201, 200]));
        assert_eq!(spans[0]["name"], "imm 0 → 1");
        assert_eq!(spans[1]["ts"], 0.005);
    }
}
