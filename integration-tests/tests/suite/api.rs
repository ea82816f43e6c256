//! Tests of the public API: every public name of `rdmc`, `rdmc-wan` and `rdmc-fabric` stands in docs/API.md, with its promise.
//!
//! `RDMC_WRITE_DOCS=1 cargo test -p rdmc-integration-tests --test suite api` writes the tables anew. Promises that stand
//! there stay; a new row has none until a person decides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use names::{Crates, Entry};

mod names;

/// The crates whose names are listed, those on which they build last.
const LISTED: [&str; 3] = ["rdmc", "rdmc-wan", "rdmc-fabric"];
/// The crates from which they re-export names.
const SOURCES: [&str; 4] = ["rdmc", "rdmc-wan", "rdmc-fabric", "rdmc-schedule"];
/// The promise of what is not `#[non_exhaustive]`.
const STABLE: &str = "stable";
/// The promise of what is.
const GROWS: &str = "may grow";
/// The promises for others than users. docs/API.md explains all of them.
const OTHERS: [&str; 2] = ["for fabric authors", "internal"];

#[test]
fn every_public_name_has_a_promise() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = root.join("docs/API.md");
    let mut page = std::fs::read_to_string(&path).expect("docs/API.md is there");
    let crates = Crates::read(&root.join("crates"), &SOURCES);
    let mut listed = BTreeSet::new();
    for name in LISTED {
        let (begin, end) = (format!("<!-- names of {name} -->"), format!("<!-- end of {name} -->"));
        let (before, rest) = page.split_once(&begin).expect("docs/API.md says where the table begins");
        let (stood, after) = rest.split_once(&end).expect("docs/API.md says where the table ends");
        let mut entries = crates.exports(name);
        // A name that an upper crate re-exports stands there only.
        entries.retain(|entry| listed.insert(entry.defined.clone()));
        let made = table(&entries, &promises(stood));
        if std::env::var_os("RDMC_WRITE_DOCS").is_some() {
            page = format!("{before}{begin}{made}{end}{after}");
            continue;
        }
        let difference = difference(stood, &made);
        assert!(
            difference.is_empty(),
            "docs/API.md does not list the public names of {name}:\n{difference}Run RDMC_WRITE_DOCS=1 cargo test -p \
             rdmc-integration-tests --test suite api, and decide on the promise of each new row"
        );
        for entry in &entries {
            let promise = &promises(stood)[&entry.name];
            let fits = match promise.as_str() {
                STABLE => !entry.is_non_exhaustive,
                GROWS => entry.is_non_exhaustive,
                other => OTHERS.contains(&other),
            };
            let what = if entry.is_non_exhaustive { "non_exhaustive " } else { "" };
            assert!(fits, "docs/API.md: the {what}{} `{}` has the promise {promise:?}", entry.kind, entry.name);
        }
    }
    if std::env::var_os("RDMC_WRITE_DOCS").is_some() {
        std::fs::write(&path, page).expect("docs/API.md can be written");
    }
}

fn table(entries: &[Entry], promises: &BTreeMap<String, String>) -> String {
    let mut text = String::from("\n\n| name | kind | promise | its names |\n|---|---|---|---|\n");
    for Entry { name, kind, names, .. } in entries {
        let promise = promises.get(name).map_or("", String::as_str);
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| `{name}` | {kind} | {promise} | {} |", names.join(", "));
    }
    text + "\n"
}

/// Reads the promises of a table.
fn promises(table: &str) -> BTreeMap<String, String> {
    let cells = table.lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    let rows = cells.filter(|cells| cells.len() > 4);
    rows.map(|cells| (cells[1].trim_matches('`').to_owned(), cells[3].to_owned())).collect()
}

/// Lists the rows that only one of the tables has.
fn difference(stood: &str, made: &str) -> String {
    let (old, new): (BTreeSet<&str>, BTreeSet<&str>) = (stood.lines().collect(), made.lines().collect());
    let removed = old.difference(&new).map(|row| format!("- {row}\n"));
    removed.chain(new.difference(&old).map(|row| format!("+ {row}\n"))).collect()
}

#[test]
fn a_name_that_is_added_removed_or_renamed_changes_the_list() {
    let names = |source: &str| {
        let crates = Crates::of(&[("one", &[("", source), ("inner", "pub struct Kept { pub field: u8, own: u8 }")])]);
        let entries = crates.exports("one").into_iter();
        entries
            .flat_map(|entry| entry.names.into_iter().map(move |name| format!("{}.{name}", entry.name)))
            .collect::<Vec<_>>()
    };
    let first = "mod inner; pub use inner::Kept; impl Kept { pub fn one(&self) {} fn own(&self) {} }";
    assert_eq!(names(first), ["Kept.field", "Kept.one()"]);
    assert_eq!(names(&first.replace("one", "two")), ["Kept.field", "Kept.two()"]);
    assert_eq!(names(&first.replace("pub use", "use")), [""; 0]);
    assert_eq!(names("#[non_exhaustive] pub enum E { A, B { x: u8 }, #[doc(hidden)] C }"), ["E.A", "E.B", "E.B.x"]);
    assert_eq!(names("pub trait T { const C: u8; type U; fn f(); }"), ["T.C", "T.U", "T.f()"]);
    assert_eq!(names("#[cfg(test)] pub mod tests { pub enum E { A } }"), [""; 0]);
}
