//! Two binary trees, with every receiver inside one of them and a leaf of the other (after Sanders, Speck, Träff 2009).
//!
//! Blocks of even number go down the first tree, the others down the second. A member receives from its parent in each
//! tree in turn, and sends to its two children in the only tree in which it has any. So all ports are busy both ways.
//! A block never waits for one that comes a longer way: distance delays a member once for each level above it.
//!
//! In each tree the p = n − 1 receivers stand in a heap: index 1 is the top, and the children of index i are 2i and
//! 2i + 1. Indices up to m = ⌊p / 2⌋ have children, the others are leaves. Ranks 1 ..= m stand in this order inside the
//! first tree, ranks m + 1 ..= 2m inside the second. If p is odd, rank p is a leaf of both.
//!
//! An edge is active in every other step. In the first tree, edges to odd indices are active in even steps, edges to
//! even indices in odd steps; in the second tree it is the other way round. An only child counts as its parent's kind.
//! So the root, which feeds both tops, and every member with two children send one block a step. A member receives one
//! block a step if its two indices are both odd or both even. Leaves are assigned to ranks so that they are.

use crate::walk::{PeerBlock, Side, StepSource, Walk};

/// Lists the hops that `rank` sends or receives; O(log n) once, then O(1) a step.
pub(crate) fn walk(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let trees = TwoTrees::new(members);
    walk_edges(
        blocks,
        match side {
            Side::Receive => trees.edges_to(rank),
            Side::Send => trees.edges_from(rank),
        },
    )
}

/// Lists the hops on a member's edges on one side.
pub(crate) fn walk_edges(blocks: u32, edges: [Option<Edge>; 2]) -> Walk {
    let edges = edges.map(|edge| edge.filter(|edge| edge.tree.blocks(blocks) > 0));
    let begin = edges.iter().flatten().map(|edge| edge.begin).min();
    let end = edges.iter().flatten().map(|edge| edge.end(blocks)).max();
    let window = begin.zip(end).map_or(0..0, |(begin, end)| begin..end);
    Walk::new(StepSource::Edges(Edges { edges, blocks }), window)
}

/// Returns k + 2⌊log₂ (n − 1)⌋, or one step less unless the last row of the heap is full but for one place; 0 for the
/// root alone.
pub(crate) fn steps(members: u32, blocks: u32) -> u64 {
    let receivers = members - 1;
    let Some(row) = receivers.checked_ilog2() else { return 0 };
    let is_full = receivers + 1 >= (2 << row) - 1;
    u64::from(blocks) + u64::from(2 * row) - u64::from(!is_full)
}

/// Returns the sender of `rank`'s first block, if it is the same for all numbers of blocks; `rank` is not the root.
///
/// A single block goes down the first tree. Of more blocks, the first one may come down the second. Members inside the
/// second tree have no first source in any case: where latencies are long, their children would wait for them to learn
/// of the message at the end of the first tree.
pub(crate) fn first_source(members: u32, rank: u32) -> Option<u32> {
    let trees = TwoTrees::new(members);
    fixed_source(trees.edges_to(rank), trees.edges_from(rank))
}

/// Returns the [first source](first_source) of a member with these edges.
pub(crate) fn fixed_source(to: [Option<Edge>; 2], from: [Option<Edge>; 2]) -> Option<u32> {
    let [Some(first), Some(second)] = to else { return None };
    let comes_first = first.begin < second.begin || first.peer == second.peer;
    let is_inside_second = from.iter().flatten().any(|edge| edge.tree == Tree::Second);
    (comes_first && !is_inside_second).then_some(first.peer)
}

/// One member's edges on one side, at most one of them active in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    edges: [Option<Edge>; 2],
    blocks: u32,
}

impl Edges {
    /// Returns the hop in `step`. O(1).
    pub(crate) fn peer_block(&self, step: u64) -> Option<PeerBlock> {
        self.edges.iter().flatten().find_map(|edge| edge.peer_block(step, self.blocks))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tree {
    First,
    Second,
}

impl Tree {
    pub(crate) const BOTH: [Tree; 2] = [Tree::First, Tree::Second];

    pub(crate) fn other(self) -> Tree {
        match self {
            Tree::First => Tree::Second,
            Tree::Second => Tree::First,
        }
    }

    /// Returns how many of a message's blocks go down this tree.
    pub(crate) fn blocks(self, blocks: u32) -> u32 {
        match self {
            Tree::First => blocks.div_ceil(2),
            Tree::Second => blocks / 2,
        }
    }
}

/// An edge of a tree, from the view of one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) tree: Tree,
    pub(crate) peer: u32,
    /// The step of the tree's first block.
    pub(crate) begin: u64,
}

impl Edge {
    /// Returns the step after the tree's last block, of which there is one at least.
    pub(crate) fn end(&self, blocks: u32) -> u64 {
        self.begin + 2 * u64::from(self.tree.blocks(blocks) - 1) + 1
    }

    fn peer_block(&self, step: u64, blocks: u32) -> Option<PeerBlock> {
        let since = step.checked_sub(self.begin)?;
        let nth = u32::try_from(since / 2).ok().filter(|nth| *nth < self.tree.blocks(blocks))?;
        let block = 2 * nth + u32::from(self.tree == Tree::Second);
        (since.is_multiple_of(2)).then_some(PeerBlock { peer: self.peer, block })
    }
}

/// The heaps of both trees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoTrees {
    receivers: u32,
    /// How many indices of a heap have children.
    inner: u32,
}

impl TwoTrees {
    pub(crate) fn new(members: u32) -> TwoTrees {
        let receivers = members - 1;
        TwoTrees { receivers, inner: receivers / 2 }
    }

    /// Returns the edges on which `rank` receives, one of each tree; none if it is the root.
    fn edges_to(self, rank: u32) -> [Option<Edge>; 2] {
        Tree::BOTH.map(|tree| {
            let index = (rank > 0).then(|| self.index(tree, rank))?;
            let peer = if index == 1 { 0 } else { self.rank(tree, index / 2) };
            Some(Edge { tree, peer, begin: self.begin(tree, index) })
        })
    }

    /// Returns the edges on which `rank` sends: to its children, or to both tops if it is the root.
    pub(crate) fn edges_from(self, rank: u32) -> [Option<Edge>; 2] {
        let to = |tree, index| {
            let begin = (index <= self.receivers).then(|| self.begin(tree, index))?;
            Some(Edge { tree, peer: self.rank(tree, index), begin })
        };
        if rank == 0 {
            return Tree::BOTH.map(|tree| to(tree, 1));
        }
        let inside = Tree::BOTH.map(|tree| (tree, self.index(tree, rank)));
        match inside.into_iter().find(|(_, index)| *index <= self.inner) {
            Some((tree, index)) => [to(tree, 2 * index), to(tree, 2 * index + 1)],
            None => [None, None],
        }
    }

    /// Returns the step in which the tree's first block reaches an index. O(log n).
    fn begin(self, tree: Tree, index: u32) -> u64 {
        let mut step = u64::from(tree == Tree::Second);
        let mut below = index;
        while below > 1 {
            // An edge of the same kind as the one above it is active in the same steps.
            let alike = below % 2 == below / 2 % 2 || self.is_only_child(below);
            step += if alike { 2 } else { 1 };
            below /= 2;
        }
        step
    }

    fn is_only_child(self, index: u32) -> bool {
        index == self.receivers && index.is_multiple_of(2)
    }

    /// Returns the rank that stands at an index.
    fn rank(self, tree: Tree, index: u32) -> u32 {
        if index <= self.inner {
            return self.first_inside(tree) + index - 1;
        }
        if self.is_leaf_of_both(index) {
            return self.receivers;
        }
        // The leaves are those that are inside the other tree.
        let nth = match (self.inner % 2, self.receivers % 2) {
            (0, _) => index - self.inner,
            (_, 1) => index - self.inner - 1,
            _ if index == self.receivers => 1,
            _ => index - self.inner + 1,
        };
        self.first_inside(tree.other()) + nth - 1
    }

    /// Returns the index at which a rank, not the root, stands.
    fn index(self, tree: Tree, rank: u32) -> u32 {
        if let Some(before) = rank.checked_sub(self.first_inside(tree)).filter(|before| *before < self.inner) {
            return before + 1;
        }
        if rank > 2 * self.inner {
            return if self.inner.is_multiple_of(2) { self.receivers } else { self.inner + 1 };
        }
        let nth = rank - self.first_inside(tree.other()) + 1;
        match (self.inner % 2, self.receivers % 2) {
            (0, _) => nth + self.inner,
            (_, 1) => nth + self.inner + 1,
            _ if nth == 1 => self.receivers,
            _ => nth + self.inner - 1,
        }
    }

    /// Tells whether the rank at this index, a leaf, is inside no tree.
    fn is_leaf_of_both(self, index: u32) -> bool {
        self.receivers % 2 == 1 && index == if self.inner.is_multiple_of(2) { self.receivers } else { self.inner + 1 }
    }

    /// Returns the first of the ranks that are inside a tree.
    fn first_inside(self, tree: Tree) -> u32 {
        match tree {
            Tree::First => 1,
            Tree::Second => 1 + self.inner,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_indices_are_each_others_inverse() {
        for members in 2..=300 {
            let trees = TwoTrees::new(members);
            for tree in Tree::BOTH {
                for rank in 1..members {
                    let index = trees.index(tree, rank);
                    assert!((1..members).contains(&index) && trees.rank(tree, index) == rank, "n = {members}, {rank}");
                }
            }
        }
    }

    #[test]
    fn a_member_has_children_in_one_tree_at_most() {
        for members in 2..=300 {
            let trees = TwoTrees::new(members);
            for rank in 1..members {
                let inside = Tree::BOTH.iter().filter(|tree| trees.index(**tree, rank) <= trees.inner).count();
                assert_eq!(inside, usize::from(rank <= 2 * trees.inner), "n = {members}, {rank}");
            }
        }
    }
}
