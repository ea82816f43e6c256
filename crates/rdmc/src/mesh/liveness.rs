//! Signs of life: nodes that share groups ask each other, and give up those who do not answer.
//!
//! A look at every connection is taken in steps of a sixth of the detection time. Who was not heard of in four of them in
//! succession is given up: between four and five steps after it was last heard of, so that the rest of the time is left
//! for the survivors to agree. A process that was itself stopped finds one step elapsed when it goes on, and hears
//! what has come meanwhile in the next ones.

use std::sync::atomic::Ordering;

use super::Mesh;
use super::frame::Frame;
use crate::failure::FailureCause;

impl Mesh {
    /// Asks the nodes that share a group with this one for signs of life, for ever.
    pub(crate) async fn watch(self) {
        let step = self.0.detection / STEPS_PER_DETECTION;
        let mut changes = self.0.changes.subscribe();
        loop {
            // While there are no groups nobody needs to be watched.
            while self.lock().groups.partners().is_empty() {
                self.lock().links.values_mut().for_each(|link| link.silent = None);
                if changes.changed().await.is_err() {
                    return;
                }
            }
            self.0.environment.sleep(step).await;
            self.look(step * SILENT_STEPS_MAX);
        }
    }

    fn look(&self, silence: std::time::Duration) {
        let asked: Vec<_> = {
            let mut state = self.lock();
            let partners = state.groups.partners();
            for (node, link) in &mut state.links {
                let heard = link.heard.swap(false, Ordering::Relaxed);
                link.silent = match link.silent.filter(|_| !heard) {
                    _ if !partners.contains(node) => None,
                    // It has not been asked before, or it has answered.
                    None => Some(0),
                    Some(steps) => Some(steps + 1),
                };
                if link.silent >= Some(SILENT_STEPS_MAX) {
                    // Fails only if it was cut before.
                    let _ = link.cut.try_send(FailureCause::Unresponsive { silence });
                }
            }
            state.links.keys().copied().filter(|node| partners.contains(node)).collect()
        };
        for node in asked {
            self.post_frame(node, &Frame::Ping);
        }
    }
}

/// Looks in one detection time.
const STEPS_PER_DETECTION: u32 = 6;
/// Looks in succession at which nothing was heard, after which a node is given up.
const SILENT_STEPS_MAX: u32 = 4;
