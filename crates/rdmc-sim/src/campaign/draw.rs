//! Draws a case from a seed.

use super::case::{
    AlgorithmCase, Behaviour, BrokenSource, Case, Fault, FaultCase, GroupCase, MemberCase, MessageCase, Milestone,
    PartsCase, RingCase, SendFuture, SourceCase, SpineCase, When,
};
use crate::model::{ClusterModel, ControlModel, DelayModel, Distribution, HostModel, NicModel, RackModel, WaitMode};
use crate::random::Random;

impl Case {
    /// Draws the case of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let nodes = draw_nodes(&mut random);
        let mut case = Self {
            seed,
            model: draw_model(&mut random, nodes),
            pool_bytes_max: POOL_BYTES_AMPLE,
            groups: Vec::new(),
            faults: Vec::new(),
            heal_ns: spread(&mut random, 10 * MS, 60 * S),
            joins: false,
        };
        let groups = *random.one_of(&[1, 1, 1, 2, 2, 3]);
        for id in 1..=groups {
            case.groups.push(draw_group(&mut random, id, nodes));
        }
        if groups == 1 && random.chance(0.2) {
            case.tighten_pool();
        }
        // A fifth of the cases has no fault, most have one, a few have many.
        let disturbances = *random.one_of(&[0, 0, 1, 1, 1, 1, 1, 2, 3, 6]);
        for _ in 0..disturbances {
            if random.chance(0.3) {
                case.draw_behaviour(&mut random);
            } else {
                let fault = case.draw_fault(&mut random);
                case.faults.push(fault);
            }
        }
        // Independent of the other faults.
        if random.chance(0.2) {
            case.flip_bits(&mut random);
        }
        case.groups.iter_mut().for_each(|group| group.draw_promises(&mut random));
        if random.chance(0.2) {
            case.flip_writes(&mut random);
        }
        for group in &mut case.groups {
            group.draw_headers(&mut random);
            group.draw_streams(&mut random);
        }
        case.joins = random.chance(0.3);
        if case.joins && random.chance(0.5) {
            // The root announces sizes to distant neighbours too.
            case.model.control.latency_ns = MS;
        }
        let shares = random.chance(0.3);
        for group in &mut case.groups {
            group.draw_rates(shares, &mut random);
        }
        case
    }

    /// Makes pools as small as possible: a group whose application keeps no messages needs memory for its longest
    /// message only. Members keep a copy of a short message until all members have it. For a longer message they report
    /// to the root at once, which frees the memory without other traffic of the group.
    ///
    /// Several groups would deadlock: their members may take memory in different orders.
    fn tighten_pool(&mut self) {
        let Some(group) = self.groups.first_mut() else { return };
        let longest = group.messages.iter().map(|message| message.size).max().unwrap_or(0);
        group.sends_from_pool = false;
        group.members.iter_mut().for_each(|member| member.holds = 0);
        self.pool_bytes_max = longest.next_multiple_of(PAGE).max(PAGE);
    }

    /// Adds a fault that flips bits of blocks to a member; its groups check blocks.
    fn flip_bits(&mut self, random: &mut Random) {
        let group = random.one_of(&self.groups);
        let first = usize::from(group.members.len() > 1);
        let node = random.one_of(&group.members[first..]).node;
        let (bit, immediate) = (random.below(1 << 15), random.chance(0.3));
        let blocks = *random.one_of(&[1, 1, 1, 2, 8, 1_000]);
        let when = draw_when_bits_flip(random, group, node);
        self.faults.push(FaultCase { when, fault: Fault::FlipBits { node, bit, immediate, blocks } });
        let its = self.groups.iter_mut().filter(|group| group.rank_of(node).is_some());
        its.for_each(|group| group.checks = true);
    }

    /// Adds a fault that flips bits of slots to a receiver or of rows to any member. Groups with a ring can heal that.
    fn flip_writes(&mut self, random: &mut Random) {
        let group = random.one_of(&self.groups);
        let of_slots = group.has_ring() && group.members.len() > 1 && random.chance(0.7);
        let node = random.one_of(&group.members[usize::from(of_slots)..]).node;
        let bit = random.below(1 << 15);
        let fault = match of_slots {
            true => Fault::FlipSlots { node, bit, slots: *random.one_of(&[1, 1, 1, 2, 8, 1_000]) },
            false => Fault::FlipRows { node, bit, rows: *random.one_of(&[1, 1, 1, 2, 8]) },
        };
        let when = draw_when_bits_flip(random, group, node);
        self.faults.push(FaultCase { when, fault });
        let checks = random.chance(0.5);
        for group in self.groups.iter_mut().filter(|group| group.rank_of(node).is_some()) {
            group.checks |= checks;
            group.recoverable |= !checks;
        }
    }

    fn draw_behaviour(&mut self, random: &mut Random) {
        let group_at = index(random, self.groups.len());
        let group = &mut self.groups[group_at];
        let rank = index(random, group.members.len());
        let count = group.messages.len();
        if rank == 0 && count > 0 && random.chance(0.5) {
            let at = index(random, count);
            let after_ns = spread(random, 1, 100 * MS);
            let futures = [SendFuture::NeverPolled, SendFuture::Dropped { after_ns }, SendFuture::Dropped { after_ns }];
            group.messages[at].future = *random.one_of(&futures);
            return;
        }
        let (after, after_ns) = (index(random, count + 1), spread(random, 1, 100 * MS));
        let mut behaviours = vec![
            Behaviour::Absent,
            Behaviour::OtherBlockSize,
            Behaviour::DropJoin { after_ns },
            Behaviour::DropHandle { after },
            Behaviour::DropClose { after_ns },
        ];
        if rank > 0 {
            behaviours.extend([
                Behaviour::DropNext { after_ns },
                Behaviour::Refuse { after },
                Behaviour::CloseEarly { after },
            ]);
            if group.members[rank].offers {
                let message = after;
                behaviours.extend([
                    Behaviour::RefuseOffer { message },
                    Behaviour::DropOffer { message },
                    Behaviour::DropDelivery { message },
                ]);
            }
        }
        group.members[rank].behaviour = *random.one_of(&behaviours);
    }

    fn draw_fault(&self, random: &mut Random) -> FaultCase {
        let group = random.one_of(&self.groups);
        let mut nodes: Vec<u32> = match random.chance(0.9) {
            true => group.members.iter().map(|member| member.node).collect(),
            false => (0..self.model.nodes).collect(),
        };
        random.shuffle(&mut nodes);
        let (node, a) = (nodes[0], nodes[0]);
        let b = nodes.get(1).copied().unwrap_or((a + 1) % self.model.nodes);
        let for_ns = spread(random, 10 * US, 60 * S);
        let times = random.within(2..=8);
        let mbps = *random.one_of(&[0, 1, self.model.port_mbps / 2]);
        let fault = match random.below(20) {
            0..=2 => Fault::Kill { node },
            3..=4 => Fault::Vanish { node },
            5..=6 => Fault::Stop { node, for_ns },
            7 => Fault::HoldUp { node, for_ns: for_ns.min(S) },
            8 => Fault::SlowDown { node, times, for_ns },
            9 => Fault::LimitPort { node, mbps, for_ns },
            10..=11 => Fault::Cut { a, b, for_ns },
            12 => Fault::ResetControl { a, b },
            13 => Fault::BreakQueuePairs { a, b },
            14..=15 => Fault::CutOneWay { from: a, to: b, for_ns },
            16 => Fault::TruncateControl { from: a, to: b, bytes: index(random, 64) },
            17 => Fault::GarbleControl { from: a, to: b, bit: index(random, 512) },
            _ => Fault::Leave { node, drain_ns: random.chance(0.5).then_some(for_ns) },
        };
        FaultCase { when: draw_when(random, group), fault }
    }
}

impl GroupCase {
    fn draw_promises(&mut self, random: &mut Random) {
        self.stable = random.chance(0.3);
        self.receipts = random.chance(0.4);
        self.recovers = random.chance(if self.stable { 0.6 } else { 0.3 }) && self.can_recover();
        let (slots, bytes) = (*random.one_of(&[2, 3, 8, 64]), *random.one_of(&[1, 50, 1000, 5000]));
        self.ring = random.chance(0.3).then_some(RingCase { slots, bytes });
        for member in &mut self.members {
            member.lets_go_each = *random.one_of(&[0, 0, 0, 1, 2, 3]);
        }
    }
}

impl GroupCase {
    /// Gives the group a weight, if groups have any, and a bound of its rate.
    fn draw_rates(&mut self, shares: bool, random: &mut Random) {
        if shares {
            self.share = *random.one_of(&[None, Some(1), Some(2), Some(1000)]);
        }
        self.rate_max = random.chance(0.1).then(|| *random.one_of(&[100_000, 1_000_000, 100_000_000]));
    }

    fn draw_headers(&mut self, random: &mut Random) {
        self.headers = random.chance(0.25) && !self.delta;
    }

    /// Lets the root read messages while it sends them, and receivers while they arrive.
    fn draw_streams(&mut self, random: &mut Random) {
        if random.chance(0.25) {
            let share = *random.one_of(&[0.2, 0.5, 1.0]);
            for message in self.messages.iter_mut().filter(|message| message.size > 0) {
                message.source = random.chance(share).then(|| draw_source(random, self.block_size));
            }
            if random.chance(0.2) && !self.messages.is_empty() {
                let at = index(random, self.messages.len());
                let message = &mut self.messages[at];
                let after = random.below(message.size.max(1));
                let broken = *random.one_of(&[BrokenSource::Ends { after }, BrokenSource::Fails { after }]);
                message.source.iter_mut().for_each(|source| source.broken = Some(broken));
            }
        }
        if random.chance(0.5) {
            for member in self.members.iter_mut().skip(1).filter(|member| member.offers) {
                let few = 1 + index(random, 100);
                member.reads_at_once = *random.one_of(&[0, few, self.block_size as usize, 10_000]);
            }
        }
    }
}

fn draw_when(random: &mut Random, group: &GroupCase) -> When {
    if random.chance(0.3) {
        return When::At { ns: spread(random, US, S) };
    }
    if random.chance(0.3) {
        let node = random.one_of(&group.members).node;
        return When::Operation { node, count: spread(random, 1, 1 << 10) };
    }
    let count = index(random, group.messages.len() + 1);
    let milestones = [
        Milestone::Joining,
        Milestone::Joined,
        Milestone::Messages { count },
        Milestone::Messages { count },
        Milestone::Closing,
        Milestone::Ended,
    ];
    let (milestone, node) = (*random.one_of(&milestones), random.one_of(&group.members).node);
    let delay_ns = if random.chance(0.2) { 0 } else { spread(random, 100, 10 * MS) };
    When::Milestone { group: group.id, node, milestone, delay_ns }
}

fn draw_when_bits_flip(random: &mut Random, group: &GroupCase, node: u32) -> When {
    let (after_ns, count) = (spread(random, US, 10 * MS), index(random, group.messages.len() + 1));
    let milestone = *random.one_of(&[Milestone::Joined, Milestone::Messages { count }]);
    let delay_ns = *random.one_of(&[0, 0, after_ns]);
    match random.chance(0.3) {
        true => When::At { ns: after_ns },
        false => When::Milestone { group: group.id, node, milestone, delay_ns },
    }
}

fn draw_nodes(random: &mut Random) -> u32 {
    let most = *random.one_of(&[3, 4, 5, 6, 8, 8, 16]);
    u32::try_from(random.within(2..=most)).expect("at most 16")
}

fn draw_model(random: &mut Random, nodes: u32) -> ClusterModel {
    let port_mbps = *random.one_of(&[10, 100, 1_000, 10_000, 40_000]);
    let mut model = ClusterModel::new(nodes, port_mbps, spread(random, 500, 200 * US));
    if random.chance(0.25) {
        let size = u32::try_from(random.within(1..=u64::from(nodes))).expect("at most 16");
        let uplink_mbps = port_mbps / random.one_of(&[1, 2, 4]);
        model.racks = Some(RackModel { size, uplink_mbps, latency_ns: 5 * US, rack_of: Vec::new() });
    }
    model.nic = NicModel {
        operation_ns: *random.one_of(&[0, 0, 200, 1_000]),
        notice_bytes: *random.one_of(&[0, 1 << 10, 64 << 10]),
        retry_ns: *random.one_of(&[100 * MS, 500 * MS, 500 * MS, 2 * S]),
        header_bytes: *random.one_of(&[0, 60]),
        ..NicModel::default()
    };
    if random.chance(0.5) {
        let delays = random.chance(0.5).then(|| DelayModel {
            probability: *random.one_of(&[0.05, 0.2]),
            mean_ns: *random.one_of(&[50_000.0, 1_000_000.0]),
            distribution: *random.one_of(&[Distribution::Fixed, Distribution::Exponential, Distribution::Lognormal]),
        });
        model.host = HostModel {
            post_ns: 300,
            completion_ns: 500,
            wake_ns: 4_000,
            wake_cpu_ns: 2_000,
            completion: *random.one_of(&[WaitMode::Poll, WaitMode::Hybrid, WaitMode::Event]),
            delays,
        };
    }
    model.control = ControlModel {
        latency_ns: *random.one_of(&[5 * US, 20 * US, 200 * US]),
        loss: *random.one_of(&[0.0, 0.0, 0.0, 0.05, 0.2]),
        patience_ns: *random.one_of(&[3 * S, 30 * S, 30 * S]),
        ..ControlModel::default()
    };
    model
}

fn draw_group(random: &mut Random, id: u64, nodes: u32) -> GroupCase {
    let mut members: Vec<u32> = (0..nodes).collect();
    random.shuffle(&mut members);
    let fewest = if random.chance(0.02) { 1 } else { 2 };
    let count = if random.chance(0.5) { u64::from(nodes) } else { random.within(fewest..=u64::from(nodes)) };
    members.truncate(usize::try_from(count).expect("at most 16"));
    let block_size = *random.one_of(&[1_u32, 7, 64, 256, 256, 1024, 1024, 4096]);
    let messages = match random.below(10) {
        0 => 0,
        1..=3 => 1,
        4..=8 => random.within(2..=6),
        _ => random.within(7..=24),
    };
    let late = random.chance(0.3);
    let delta = random.chance(0.25);
    let members: Vec<MemberCase> = members.into_iter().map(|node| draw_member(random, node, late, delta)).collect();
    GroupCase {
        id,
        algorithm: draw_algorithm(random, members.len()),
        members,
        block_size,
        formation_limit_ns: *random.one_of(&[2 * S, 30 * S, 30 * S]),
        messages: (0..messages).map(|_| draw_message(random, block_size)).collect(),
        sends_ahead: *random.one_of(&[1, 1, 2, 4, 32]),
        sends_from_pool: random.chance(0.2),
        recoverable: random.chance(0.7),
        recovers: false,
        checks: random.chance(0.3),
        delta,
        stable: false,
        receipts: false,
        ring: None,
        headers: false,
        share: None,
        rate_max: None,
    }
}

fn draw_member(random: &mut Random, node: u32, late: bool, delta: bool) -> MemberCase {
    let offers = random.chance(if delta { 0.6 } else { 0.3 });
    // Groups that are not delta groups ignore it.
    let has = (offers && random.chance(if delta { 0.8 } else { 0.1 }))
        .then(|| PartsCase { percent: *random.one_of(&[0, 10, 50, 90, 100]), seed: random.next_u64() });
    MemberCase {
        node,
        begins_ns: if late { spread(random, US, 20 * MS) } else { 0 },
        offers,
        has,
        pause_ns: if random.chance(0.2) { spread(random, US, 5 * MS) } else { 0 },
        holds: if random.chance(0.2) { index(random, 4) } else { 0 },
        lets_go_each: 0,
        reads_at_once: 0,
        behaviour: Behaviour::Ordinary,
    }
}

fn draw_message(random: &mut Random, block_size: u32) -> MessageCase {
    let block = u64::from(block_size);
    let blocks = spread(random, 2, 24);
    let size = match random.below(10) {
        0 => 0,
        1 => 1,
        2 => block - 1,
        3 => block,
        4 => block + 1,
        5..=6 => blocks * block,
        _ => blocks * block - random.below(block),
    };
    MessageCase { size, future: SendFuture::Completes, source: None }
}

fn draw_source(random: &mut Random, block_size: u32) -> SourceCase {
    let piece = *random.one_of(&[block_size.div_ceil(3), block_size, block_size * 4]);
    let pause_ns = if random.chance(0.5) { spread(random, US, 2 * MS) } else { 0 };
    SourceCase { piece, pause_ns, broken: None }
}

fn draw_algorithm(random: &mut Random, members: usize) -> AlgorithmCase {
    match random.below(9) {
        0 => AlgorithmCase::Sequential,
        1 => AlgorithmCase::Chain,
        2 => AlgorithmCase::BinomialTree,
        3..=4 => AlgorithmCase::BinomialPipeline,
        5 => AlgorithmCase::Circulant,
        6 => AlgorithmCase::TwoTree,
        _ => {
            let most = random.within(1..=members as u64);
            let racks = (0..members).map(|_| u32::try_from(random.below(most)).expect("at most 16")).collect();
            AlgorithmCase::Hybrid { racks, spine: *random.one_of(&SpineCase::ALL) }
        }
    }
}

/// Draws a number; all orders of magnitude are about equally likely.
fn spread(random: &mut Random, low: u64, high: u64) -> u64 {
    let octave = low << random.within(0..=u64::from((high / low).ilog2()));
    random.within(octave..=(2 * octave).min(high))
}

fn index(random: &mut Random, count: usize) -> usize {
    usize::try_from(random.below(count as u64)).expect("an index")
}

/// Pool size at which no member waits for memory.
const POOL_BYTES_AMPLE: u64 = 1 << 30;
/// The pool's unit in bytes.
const PAGE: u64 = 4 << 10;
/// A microsecond in ns.
const US: u64 = 1_000;
/// A millisecond in ns.
const MS: u64 = 1_000_000;
/// A second in ns.
const S: u64 = 1_000_000_000;
