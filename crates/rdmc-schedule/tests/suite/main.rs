//! The schedules, checked from outside.

#![expect(clippy::unwrap_used, reason = "in tests a panic is the verdict")]

mod extremes;
mod hybrid;
mod interface;
mod invariants;
mod neighbours;
mod repair;
mod shape;
mod slack;
mod timetable;
