//! Copies in memory: the bound that a multicast to processes of one host cannot beat by much.
//!
//! The unsafe code here is the store that bypasses the caches, which has no safe form.

use std::sync::Barrier;

use anyhow::Context;
use rdmc::{BufferMut, Fabric, TcpFabric};

use crate::local::{monotonic_ns, seconds};

/// A source, and a destination for each receiver, in memory like that of receivers. All pages have been touched.
pub(crate) struct Copies {
    source: BufferMut,
    destinations: Vec<BufferMut>,
}

/// How blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// As the standard library copies.
    Plain,
    /// Bypassing the caches.
    NonTemporal,
}

/// One pass of copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    pub(crate) stores: Stores,
    pub(crate) threads: usize,
    /// Length in bytes of the unit that a thread copies to one destination after the other.
    pub(crate) block: usize,
    /// Number of repetitions, if a single copy is too short to be timed.
    pub(crate) times: usize,
}

impl Copies {
    /// Takes and touches memory.
    pub(crate) fn new(bytes: usize, destinations: usize) -> anyhow::Result<Self> {
        let fabric = TcpFabric::new();
        let touched = |value: u8| {
            let region = fabric.allocate(bytes).context("memory for copies")?;
            let mut memory = region.into_mut().expect("anonymous memory is writable");
            memory.fill(value);
            anyhow::Ok(memory)
        };
        let destinations = (0..destinations).map(|_| touched(0)).collect::<anyhow::Result<_>>()?;
        Ok(Self { source: touched(0x5a)?, destinations })
    }

    /// Copies the source to all destinations, and returns the seconds for one repetition.
    #[expect(clippy::cast_precision_loss, reason = "a mean of a few")]
    pub(crate) fn run(&mut self, pass: Pass) -> f64 {
        let source: &[u8] = &self.source;
        let mut places: Vec<_> = self.destinations.iter_mut().map(|to| to.chunks_mut(pass.block)).collect();
        let mut shares: Vec<Share<'_>> = (0..pass.threads).map(|_| Vec::new()).collect();
        for (number, block) in source.chunks(pass.block).enumerate() {
            let to = places.iter_mut().filter_map(Iterator::next).collect();
            shares[number % pass.threads].push((block, to));
        }
        let barrier = Barrier::new(pass.threads);
        let ran = |mut share: Share<'_>| {
            barrier.wait();
            let begun = monotonic_ns();
            for _ in 0..pass.times {
                for (block, places) in &mut share {
                    for place in places {
                        copy(place, block, pass.stores);
                    }
                }
            }
            (begun, monotonic_ns())
        };
        let times: Vec<(u64, u64)> = std::thread::scope(|scope| {
            let threads: Vec<_> = shares.into_iter().map(|share| scope.spawn(|| ran(share))).collect();
            threads.into_iter().map(|thread| thread.join().expect("copying does not panic")).collect()
        });
        let begun = times.iter().map(|(begun, _)| *begun).min().unwrap_or(0);
        let ended = times.iter().map(|(_, ended)| *ended).max().unwrap_or(0);
        seconds(ended - begun) / pass.times as f64
    }
}

/// The blocks that a thread copies, each with its destinations.
type Share<'a> = Vec<(&'a [u8], Vec<&'a mut [u8]>)>;

/// Whether this processor has non-temporal stores.
pub(crate) const HAS_NON_TEMPORAL: bool = cfg!(target_arch = "x86_64");

fn copy(to: &mut [u8], from: &[u8], stores: Stores) {
    match stores {
        Stores::Plain => to.copy_from_slice(from),
        Stores::NonTemporal => copy_around_caches(to, from),
    }
    // Keeps the compiler from merging passes.
    std::hint::black_box(to);
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_around_caches(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "stores around the caches have no safe form")]
fn copy_around_caches(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    assert_eq!(to.len(), from.len(), "a block is copied whole");
    // SAFETY: any bytes are a vector of integers, and a vector of integers is any bytes.
    let (before, vectors, after) = unsafe { to.align_to_mut::<__m128i>() };
    let (first, rest) = from.split_at(before.len());
    before.copy_from_slice(first);
    let (middle, last) = rest.split_at(rest.len() - after.len());
    after.copy_from_slice(last);
    for (vector, bytes) in vectors.iter_mut().zip(middle.chunks_exact(16)) {
        // SAFETY: `bytes` are 16 bytes, which may be read at any alignment; x86-64 always has SSE2.
        let value = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        // SAFETY: `vector` is exclusive and aligned, as a reference is. The fence below orders the store before
        // anything that other threads learn.
        unsafe { _mm_stream_si128(vector, value) };
    }
    // SAFETY: x86-64 always has SSE.
    #[allow(unused_unsafe, reason = "safe in later versions of the standard library")]
    unsafe {
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_around_the_caches_copy_every_byte_at_any_alignment() {
        let from: Vec<u8> = (0..=255).cycle().take(1000).collect();
        for (start, end) in [(0, 1000), (1, 999), (3, 20), (15, 16), (7, 7), (16, 48)] {
            let mut to = vec![0; 1000];
            copy(&mut to[start..end], &from[start..end], Stores::NonTemporal);
            assert_eq!(to[start..end], from[start..end], "{start}..{end}");
            assert!(to[..start].iter().chain(&to[end..]).all(|byte| *byte == 0), "{start}..{end}");
        }
    }

    #[test]
    fn every_destination_gets_everything() {
        for stores in [Stores::Plain, Stores::NonTemporal] {
            for (threads, block) in [(1, 5000), (2, 512), (3, 4096)] {
                let mut copies = Copies::new(5000, 3).unwrap();
                assert!(copies.run(Pass { stores, threads, block, times: 2 }) >= 0.0);
                let whole = |to: &BufferMut| to.iter().all(|byte| *byte == 0x5a);
                assert!(copies.destinations.iter().all(whole), "{stores:?} {threads} {block}");
            }
        }
    }
}
