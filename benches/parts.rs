//! Measures single parts by time: the cost of a block in the schedule, in the sum, and from one node to another.
//!
//! `cargo bench -p rdmc-benches --bench parts` measures all of them; `-- schedule` measures those with this word in
//! their names. Compare times of one machine only. `--bench instructions` counts instructions, which do not depend on
//! the load of the machine.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput};
use rdmc::{Fabric, MemNetwork};
use rdmc_benches::{Members, object};
use rdmc_schedule::{Algorithm, BlockCount, CostModel, Hybrid, Racks, Rank, Schedule, Spine};
use twox_hash::xxhash3_128;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    schedules(&mut criterion);
    cost_model(&mut criterion);
    checksums(&mut criterion);
    blocks(&mut criterion);
    criterion.final_summary();
}

/// Measures the sends and receives of one member for a message, for each of its blocks.
fn schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule");
    group.throughput(Throughput::Elements(BLOCKS.into()));
    let racks = Racks::from_sizes(&[16; 4]).expect("racks of 16");
    let hybrid = Algorithm::Hybrid(Hybrid::new(racks, Spine::BinomialPipeline));
    for algorithm in Algorithm::ALL_FLAT.into_iter().chain([hybrid]) {
        let schedule = Schedule::new(&algorithm, MEMBERS, BlockCount(BLOCKS)).expect("a schedule of 64 members");
        for rank in [0, 21].map(Rank) {
            let role = if rank.is_root() { "root" } else { "relayer" };
            group.bench_function(BenchmarkId::new(algorithm.to_string(), role), |bencher| {
                bencher.iter(|| {
                    let sends = black_box(&schedule).sends(rank).fold(0, |sum, send| sum ^ send.block.0);
                    schedule.receives(rank).fold(sends, |sum, receive| sum ^ receive.block.0)
                });
            });
        }
    }
    group.finish();
}

/// Measures the choice of an algorithm and a block size.
fn cost_model(criterion: &mut Criterion) {
    let model = CostModel::network(1.25e9, Duration::from_micros(50), Duration::from_micros(20));
    criterion.bench_function("cost model/best of 64 members", |bencher| {
        bencher.iter(|| black_box(&model).best(MEMBERS, black_box(1 << 30)));
    });
}

/// Measures the sum by which the runtime checks a block.
fn checksums(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("checksum");
    let bytes = object(1);
    for len in [1 << 10, 64 << 10, 1 << 20] {
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_with_input(BenchmarkId::from_parameter(len), &bytes[..len], |bencher, block| {
            bencher.iter(|| xxhash3_128::Hasher::oneshot(black_box(block)));
        });
    }
    group.finish();
}

/// Measures a block of a long message, from one node of this process to another.
fn blocks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block through mem");
    group.throughput(Throughput::Elements(BLOCKS.into()));
    for (block_size, checks) in [(1 << 10, false), (1 << 10, true), (64 << 10, false), (64 << 10, true)] {
        let name = BenchmarkId::new(if checks { "checked" } else { "unchecked" }, block_size);
        group.bench_function(name, |bencher| bencher.iter_custom(|rounds| multicasts(rounds, block_size, checks)));
    }
    group.finish();
}

/// Measures multicasts to one receiver.
fn multicasts(rounds: u64, block_size: u32, checks: bool) -> Duration {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let message = Bytes::from(vec![7; (BLOCKS * block_size) as usize]);
    let network = MemNetwork::new();
    let fabrics: Vec<Arc<dyn Fabric>> = vec![network.fabric(), network.fabric()];
    let time = async {
        let mut members = Members::join(fabrics, block_size, checks).await?;
        members.multicast(message.clone()).await?;
        let began = Instant::now();
        for _ in 0..rounds {
            members.multicast(message.clone()).await?;
        }
        let time = began.elapsed();
        members.close().await?;
        anyhow::Ok(time)
    };
    runtime.block_on(time).expect("members of one process")
}

/// Members of the schedules.
const MEMBERS: u32 = 64;
/// Blocks of a message.
const BLOCKS: u32 = 256;
