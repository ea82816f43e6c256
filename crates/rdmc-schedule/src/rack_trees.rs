//! Two trees for members in racks: every block enters every rack once.
//!
//! As with [two trees](crate::two_tree) of single members, blocks of even number go down the first tree and the others
//! down the second, every member receives from its parent in each, and none sends to more than two. The racks stand in
//! two trees of this kind, the root's rack above both. In a rack of s members a tree has s − 1 edges, and one more to
//! each rack below it. Both trees together have 2s edges at most, two for each member.
//!
//! In a rack, a tree grows from its entry. Members take the oldest free place. Racks below go first, because they may
//! be far away, but leave one place for the members. Members that have children in the first tree come last in the
//! second.
//!
//! An edge is active in every other step. Two edges that end at one member are active in different steps, and so are
//! two that begin at one. These pairs form paths and even cycles of edges, along which the steps alternate.

use std::cmp::Reverse;
use std::collections::VecDeque;

use crate::two_tree::{self, Edge, Tree, TwoTrees};
use crate::walk::{Side, Walk};

/// Both trees over all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RackTrees {
    /// The edges on which each rank receives, one of each tree; none for the root.
    to: Vec<[Option<Edge>; 2]>,
    /// The edges on which each rank sends.
    from: Vec<[Option<Edge>; 2]>,
}

impl RackTrees {
    /// Makes the trees for racks of these ranks; rank 0 comes first in the first rack. O(n log n).
    pub(crate) fn new(racks: &[&[u32]]) -> RackTrees {
        let members = racks.iter().map(|ranks| ranks.len()).sum();
        let mut growing = Growing {
            places: vec![2; members],
            children: vec![Vec::with_capacity(2); members],
            entries: Tree::BOTH.map(|_| Vec::with_capacity(racks.len())),
            crossings: Vec::new(),
        };
        let among_racks = TwoTrees::new(u32::try_from(racks.len()).expect("there are no more racks than members"));
        for (rack, ranks) in (0..).zip(racks) {
            let below = among_racks.edges_from(rack);
            for tree in Tree::BOTH {
                let below = below.iter().flatten().filter(|edge| edge.tree == tree).map(|edge| edge.peer);
                growing.grow(tree, ranks, below.collect());
            }
        }
        growing.finish()
    }

    /// Lists the hops that `rank` sends or receives; O(1) once and for each step.
    pub(crate) fn walk(&self, blocks: u32, rank: u32, side: Side) -> Walk {
        let edges = match side {
            Side::Send => &self.from,
            Side::Receive => &self.to,
        };
        two_tree::walk_edges(blocks, edges[rank as usize])
    }

    /// Returns the number of steps; 0 for the root alone. O(n).
    pub(crate) fn steps(&self, blocks: u32) -> u64 {
        let edges = self.to.iter().flatten().flatten().filter(|edge| edge.tree.blocks(blocks) > 0);
        edges.map(|edge| edge.end(blocks)).max().unwrap_or(0)
    }

    /// Returns the sender of `rank`'s first block as [`two_tree::first_source`] does.
    pub(crate) fn first_source(&self, rank: u32) -> Option<u32> {
        two_tree::fixed_source(self.to[rank as usize], self.from[rank as usize])
    }

    /// Returns the most hops from rack to rack that a block takes, one after the other, and the most inside racks.
    /// O(n).
    pub(crate) fn hops(&self, rack_of: impl Fn(u32) -> u32) -> (u32, u32) {
        let (mut most_between, mut most_inside) = (0, 0);
        for tree in Tree::BOTH {
            let mut reached = vec![(0, 0, 0)];
            while let Some((rank, between, inside)) = reached.pop() {
                (most_between, most_inside) = (most_between.max(between), most_inside.max(inside));
                reached.extend(self.edges_below(tree, rank).map(|edge| {
                    let crosses = u32::from(rack_of(edge.peer) != rack_of(rank));
                    (edge.peer, between + crosses, inside + 1 - crosses)
                }));
            }
        }
        (most_between, most_inside)
    }

    fn edges_below(&self, tree: Tree, rank: u32) -> impl Iterator<Item = &Edge> {
        self.from[rank as usize].iter().flatten().filter(move |edge| edge.tree == tree)
    }
}

/// Trees that grow rack by rack.
struct Growing {
    /// How many children each rank may still get.
    places: Vec<usize>,
    /// The children of each rank, and the trees in which they are.
    children: Vec<Vec<(Tree, u32)>>,
    /// The rank at which each tree enters each rack.
    entries: [Vec<u32>; 2],
    /// The edges between racks: the tree, the rank above, and the rack below.
    crossings: Vec<(Tree, u32, u32)>,
}

impl Growing {
    /// Grows a tree inside a rack, and lets the racks `below` follow.
    fn grow(&mut self, tree: Tree, ranks: &[u32], below: Vec<u32>) {
        let mut order = ranks.to_vec();
        order.sort_by_key(|&rank| (rank != 0, Reverse(self.places_in_one_tree(rank))));
        let mut members = order.into_iter();
        let mut below = below.into_iter().peekable();
        let entry = members.next().expect("no rack is empty");
        self.entries[tree as usize].push(entry);
        let mut open: VecDeque<u32> = std::iter::repeat_n(entry, self.places_in_one_tree(entry)).collect();
        while below.peek().is_some() || members.len() > 0 {
            let above = open.pop_front().expect("both trees together have as many edges as places at most");
            self.places[above as usize] -= 1;
            let keeps_open = !open.is_empty() || members.len() == 0;
            if let Some(rack) = below.next_if(|_| keeps_open) {
                self.crossings.push((tree, above, rack));
                continue;
            }
            let member = members.next().expect("no rack took the place");
            self.children[above as usize].push((tree, member));
            open.extend(std::iter::repeat_n(member, self.places_in_one_tree(member)));
        }
    }

    /// Returns how many children a rank can get in the tree that grows. The root feeds the tops of both.
    fn places_in_one_tree(&self, rank: u32) -> usize {
        if rank == 0 { 1 } else { self.places[rank as usize] }
    }

    /// Joins the racks, and finds the steps of all edges.
    fn finish(mut self) -> RackTrees {
        for (tree, above, rack) in std::mem::take(&mut self.crossings) {
            let entry = self.entries[tree as usize][rack as usize];
            self.children[above as usize].push((tree, entry));
        }
        let is_odd = self.parities();
        let members = self.children.len();
        let mut trees = RackTrees { to: vec![[None; 2]; members], from: vec![[None; 2]; members] };
        for tree in Tree::BOTH {
            let mut reached = vec![(0, None)];
            while let Some((above, held_from)) = reached.pop() {
                for (place, &(_, rank)) in
                    self.children[above as usize].iter().enumerate().filter(|(_, (of, _))| *of == tree)
                {
                    let wants_odd = is_odd[rank as usize][tree as usize];
                    let next: u64 = held_from.map_or(0, |step: u64| step + 1);
                    let begin = next + u64::from((next % 2 == 1) != wants_odd);
                    trees.to[rank as usize][tree as usize] = Some(Edge { tree, peer: above, begin });
                    trees.from[above as usize][place] = Some(Edge { tree, peer: rank, begin });
                    reached.push((rank, Some(begin)));
                }
            }
        }
        trees
    }

    /// Returns, for each rank and tree, whether the edge to the rank is active in odd steps.
    fn parities(&self) -> Vec<[bool; 2]> {
        let members = self.children.len();
        let mut above = vec![[0_u32; 2]; members];
        for (parent, children) in (0..).zip(&self.children) {
            for &(tree, child) in children {
                above[child as usize][tree as usize] = parent;
            }
        }
        let mut known = vec![[None; 2]; members];
        // The root comes first: its edge of the first tree is active in even steps.
        for &(tree, child) in self.children.iter().flatten() {
            let mut path = vec![(tree, child, tree == Tree::Second)];
            while let Some((tree, child, is_odd)) = path.pop() {
                let edge: &mut Option<bool> = &mut known[child as usize][tree as usize];
                if edge.is_some() {
                    continue;
                }
                *edge = Some(is_odd);
                let siblings: &Vec<(Tree, u32)> = &self.children[above[child as usize][tree as usize] as usize];
                let sibling = siblings.iter().find(|other| **other != (tree, child));
                let others = sibling.copied().into_iter().chain([(tree.other(), child)]);
                path.extend(others.map(|(tree, child)| (tree, child, !is_odd)));
            }
        }
        known.into_iter().map(|edges| edges.map(|is_odd| is_odd.unwrap_or(false))).collect()
    }
}
