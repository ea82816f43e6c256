//! The pages that people read: their links lead somewhere, and they stay short.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[test]
fn every_link_leads_to_a_file() {
    let root = root();
    for page in pages(&root) {
        let text = std::fs::read_to_string(&page).expect("it is text");
        for link in links(&text) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let target = page.parent().expect("a directory").join(path);
            assert!(target.exists(), "{}: {link} leads nowhere", page.display());
        }
    }
}

/// A link that leaves docs/ is dead in the book; README links into it.
#[test]
fn the_book_has_every_page_and_its_links_stay_in_it() {
    let docs = root().join("docs").canonicalize().expect("docs/");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("docs/SUMMARY.md");
    let listed: BTreeSet<PathBuf> = links(&summary).map(|link| docs.join(link)).collect();
    for page in markdown_below(&docs) {
        if page.ends_with("SUMMARY.md") {
            continue;
        }
        assert!(listed.contains(&page), "docs/SUMMARY.md does not list {}", page.display());
        let text = std::fs::read_to_string(&page).expect("it is text");
        for link in links(&text).filter(|link| !link.contains("://") && !link.starts_with('#')) {
            let path = link.split('#').next().unwrap_or_default();
            let target = page.parent().expect("a directory").join(path).canonicalize();
            let target = target.unwrap_or_else(|error| panic!("{}: {link}: {error}", page.display()));
            assert!(
                target.starts_with(&docs),
                "{}: {link} leaves the book; name the path in backquotes",
                page.display()
            );
        }
    }
    for page in listed {
        assert!(page.exists(), "docs/SUMMARY.md lists {}, which is not there", page.display());
    }
}

#[test]
fn every_decision_is_in_the_index() {
    let decisions = root().join("docs/decisions");
    let index = std::fs::read_to_string(decisions.join("README.md")).expect("docs/decisions/README.md");
    let listed: BTreeSet<String> = links(&index).map(str::to_owned).collect();
    for page in markdown_below(&decisions) {
        let name = page.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        assert!(name == "README.md" || listed.contains(&name), "the index of decisions does not list {name}");
    }
}

#[test]
fn pages_stay_short() {
    let root = root();
    for (page, lines_max, words_max) in [("README.md", 150, 1200), ("docs/ARCHITECTURE.md", usize::MAX, 3300)] {
        let text = std::fs::read_to_string(root.join(page)).expect("it is text");
        let (lines, words) = (text.lines().count(), text.split_whitespace().count());
        assert!(lines <= lines_max && words <= words_max, "{page} has {lines} lines and {words} words");
    }
    for page in pages(&root) {
        let text = std::fs::read_to_string(&page).expect("it is text");
        let mut is_code = false;
        for (number, line) in (1..).zip(text.lines()) {
            is_code ^= line.trim_start().starts_with("```");
            // A row of a table cannot be broken, nor what a program prints.
            let may_be_long = is_code || line.trim_start().starts_with('|') || line.contains("](");
            let columns = line.chars().count();
            assert!(may_be_long || columns <= 120, "{}:{number} has {columns} columns", page.display());
        }
    }
}

/// Each path in the tables of ARCHITECTURE is one of the repository, of `src/` of a crate that its heading names, or of a
/// directory in the same line.
#[test]
fn architecture_names_files_that_exist() {
    let root = root();
    let text = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).expect("it is text");
    let mut rooms: Vec<PathBuf> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(heading) = line.strip_prefix("### ") {
            let named = heading.split('`').map(|word| root.join("crates").join(word).join("src"));
            rooms = named.filter(|dir| dir.is_dir()).collect();
        }
        let words = || line.split('`').skip(1).step_by(2);
        let dirs: Vec<PathBuf> = words().filter(|word| word.ends_with('/')).map(|dir| root.join(dir)).collect();
        for path in words().filter(|word| [".rs", ".sh", ".toml", ".c"].iter().any(|end| word.ends_with(end))) {
            let found = rooms.iter().chain(&dirs).chain([&root]).any(|dir| dir.join(path).exists());
            assert!(found, "docs/ARCHITECTURE.md:{number}: there is no {path}");
        }
    }
}

/// Lines of both may be indented differently.
#[test]
fn code_of_the_embedding_page_is_that_of_its_example() {
    let read = |path| {
        let text = std::fs::read_to_string(root().join(path)).expect("it is text");
        text.lines().map(|line| line.trim().to_owned() + "\n").collect::<String>()
    };
    let (page, example) = (read("docs/EMBEDDING.md"), read("examples/registry.rs"));
    let blocks: Vec<&str> = page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(blocks.len() > 3, "the page shows {} pieces of the example", blocks.len());
    for block in blocks {
        assert!(example.contains(block), "examples/registry.rs does not contain this code of the page:\n{block}");
    }
}

/// Lists the targets of a page's links.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    let prose = text.lines().filter(move |line| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code
    });
    prose.flat_map(|line| line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()))
}

/// Lists the pages of the repository.
fn pages(root: &Path) -> Vec<PathBuf> {
    let own = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|page| root.join(page));
    own.into_iter().chain(markdown_below(&root.join("docs"))).collect()
}

fn markdown_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory of pages") {
        let path = entry.expect("a directory of pages").path();
        if path.is_dir() {
            found.extend(markdown_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
