//! Performance isolation between flows on the same ports: large beside large, and small beside large messages (Zhang et
//! al., KBNets 2017).

use super::{ExperimentError, Options, Report};
use crate::plot::Figure;

mod elephants;
mod flows;
mod groups;
mod mice;
mod verbs;

use elephants::Elephants;
pub use flows::{PlayedFlows, play_flows};
use groups::SmallBesideBulk;
use mice::Mice;
use verbs::Verbs;

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let elephants = Elephants::measure()?;
    let verbs = Verbs::measure()?;
    let mice = Mice::measure()?;
    let bulk = SmallBesideBulk::measure(options.seed)?;
    let mut findings = elephants.findings();
    findings.extend(verbs.findings());
    findings.extend(mice.findings());
    findings.extend(bulk.findings());
    let tables = vec![elephants.table(), verbs.table(), mice.table(), bulk.table()];
    let panels = vec![elephants.panel(), mice.panel(), bulk.sizes_panel(), bulk.pacing_panel()];
    let mut figure = Figure::new("Large messages beside large ones, and small ones beside large ones", panels);
    figure.subtitle = Some(
        "ConnectX-3 FDR, 48 Gbit/s; the pause of 65 µs after a completion event and the queue of 8 KiB are fitted"
            .into(),
    );
    Ok(Report { name: "isolation", title: "Performance isolation".into(), tables, figure, findings })
}
