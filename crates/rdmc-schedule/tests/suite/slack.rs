//! How long relays hold a block before they pass it on: what the schedule forgives a slow member.

use rdmc_schedule::Algorithm;

use crate::timetable::Timetable;

/// Returns the mean slack of the relays that send in each step, `None` where none does.
fn slack_by_step(timetable: &Timetable) -> Vec<Option<f64>> {
    let steps = usize::try_from(timetable.schedule.steps()).unwrap();
    let mut sums = vec![(0, 0_u32); steps];
    for crossing in timetable.crossings.iter().filter(|crossing| crossing.from != 0) {
        let arrival = timetable.arrival(crossing.from, crossing.block).unwrap();
        let (sum, count) = &mut sums[usize::try_from(crossing.step).unwrap()];
        *sum += u32::try_from(crossing.step - arrival).unwrap();
        *count += 1;
    }
    let mean = |(sum, count)| (count > 0).then(|| f64::from(sum) / f64::from(count));
    sums.into_iter().map(mean).collect()
}

#[test]
fn steady_steps_have_the_papers_average_slack() {
    for dimensions in 2..=9_u32 {
        let members = 1 << dimensions;
        for blocks in [1, 2, dimensions, 40] {
            let timetable = Timetable::checked(&Algorithm::BinomialPipeline, members, blocks);
            let expected = 2.0 * (1.0 - f64::from(dimensions - 1) / f64::from(members - 2));
            for slack in &slack_by_step(&timetable)[dimensions as usize..] {
                let difference = (slack.unwrap() - expected).abs();
                assert!(difference < 1e-12, "n = {members}, k = {blocks}: {slack:?}, not {expected}");
            }
        }
    }
}

#[test]
fn just_above_powers_of_two_the_circulant_schedule_has_more_slack() {
    let expected = [(5, 1.33, 2.23), (9, 1.43, 2.46), (33, 1.74, 2.53)];
    for (members, pipeline, circulant) in expected {
        for (algorithm, expected) in [(Algorithm::BinomialPipeline, pipeline), (Algorithm::Circulant, circulant)] {
            let timetable = Timetable::checked(&algorithm, members, 200);
            let middle = &slack_by_step(&timetable)[50..150];
            let mean = middle.iter().map(|slack| slack.unwrap()).sum::<f64>() / 100.0;
            assert!((mean - expected).abs() < 0.005, "{algorithm}, n = {members}: {mean}, not {expected}");
        }
    }
}
