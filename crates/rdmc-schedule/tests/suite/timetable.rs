//! A whole schedule as data, and the properties every schedule must have.

use std::collections::HashMap;

use rdmc_schedule::{Algorithm, BlockCount, Hop, Racks, Rank, Schedule};

/// One hop, seen from outside; ordered by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Crossing {
    pub(crate) step: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) block: u32,
}

pub(crate) struct Timetable {
    pub(crate) schedule: Schedule,
    pub(crate) crossings: Vec<Crossing>,
    /// The step in which a member got a block, by `member * k + block`.
    arrivals: Vec<Option<u64>>,
}

impl Timetable {
    /// Computes the schedule from both sides and checks all that must hold of it.
    pub(crate) fn checked(algorithm: &Algorithm, members: u32, blocks: u32) -> Timetable {
        let what = || format!("{algorithm}, n = {members}, k = {blocks}");
        let schedule = Schedule::new(algorithm, members, BlockCount(blocks)).unwrap();
        let crossings = sent(&schedule);
        assert_eq!(crossings, received(&schedule), "both ends agree: {}", what());

        let mut timetable = Timetable { schedule, crossings, arrivals: vec![None; (members * blocks) as usize] };
        timetable.fill_arrivals();
        timetable.check_causality();
        timetable.check_ports();
        let missing = timetable.arrivals[blocks as usize..].iter().filter(|arrival| arrival.is_none());
        assert_eq!(missing.count(), 0, "everybody gets every block: {}", what());
        let last = timetable.crossings.last().map_or(0, |last| last.step + 1);
        assert_eq!(timetable.schedule.steps(), last, "the last step is used: {}", what());
        timetable
    }

    pub(crate) fn arrival(&self, member: u32, block: u32) -> Option<u64> {
        self.arrivals[self.place(member, block)]
    }

    fn place(&self, member: u32, block: u32) -> usize {
        (member * self.schedule.blocks().get() + block) as usize
    }

    fn fill_arrivals(&mut self) {
        for crossing in &self.crossings {
            let place = self.place(crossing.to, crossing.block);
            assert_ne!(crossing.to, 0, "the root receives nothing");
            assert_eq!(self.arrivals[place], None, "a block comes once: {crossing:?}");
            self.arrivals[place] = Some(crossing.step);
        }
    }

    fn check_causality(&self) {
        for crossing in self.crossings.iter().filter(|crossing| crossing.from != 0) {
            let arrival = self.arrival(crossing.from, crossing.block);
            assert!(
                arrival.is_some_and(|arrival| arrival < crossing.step),
                "sent before it was held: {crossing:?}, held from {arrival:?}",
            );
        }
    }

    /// At most one send and one receive per member and step, and level.
    fn check_ports(&self) {
        let racks = match self.schedule.algorithm() {
            Algorithm::Hybrid(hybrid) => Some(hybrid.racks.as_ref()),
            _ => None,
        };
        let mut sending = HashMap::new();
        let mut receiving = HashMap::new();
        for crossing in &self.crossings {
            let level = racks.is_some_and(|racks| crosses_racks(racks, crossing));
            let earlier = sending.insert((crossing.from, level), crossing.step);
            assert!(earlier < Some(crossing.step), "sends twice: {crossing:?}");
            let earlier = receiving.insert(crossing.to, crossing.step);
            assert!(earlier < Some(crossing.step), "receives twice: {crossing:?}");
        }
    }
}

pub(crate) fn crosses_racks(racks: &Racks, crossing: &Crossing) -> bool {
    racks.rack_of(Rank(crossing.from)) != racks.rack_of(Rank(crossing.to))
}

fn sent(schedule: &Schedule) -> Vec<Crossing> {
    by_step(schedule, |rank| {
        let sends = schedule.sends(Rank(rank)).map(move |send| (send, rank, send.peer.0));
        sends.collect()
    })
}

fn received(schedule: &Schedule) -> Vec<Crossing> {
    by_step(schedule, |rank| {
        let receives = schedule.receives(Rank(rank));
        let expected = if rank == 0 { 0 } else { schedule.blocks().get() };
        assert_eq!(receives.len(), expected as usize);
        let receives = receives.map(move |receive| (receive, receive.peer.0, rank));
        receives.collect()
    })
}

fn by_step(schedule: &Schedule, list: impl Fn(u32) -> Vec<(Hop, u32, u32)>) -> Vec<Crossing> {
    let mut crossings = Vec::new();
    for rank in 0..schedule.members() {
        let hops = list(rank);
        let in_order = hops.windows(2).all(|pair| pair[0].0.step <= pair[1].0.step);
        assert!(in_order, "hops come in step order: rank {rank}, {schedule:?}");
        crossings.extend(hops.into_iter().map(|(hop, from, to)| Crossing {
            step: hop.step.0,
            from,
            to,
            block: hop.block.0,
        }));
    }
    crossings.sort_unstable();
    crossings
}
