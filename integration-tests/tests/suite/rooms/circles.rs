//! Tests of the sources: the modules of a crate import each other without circles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The crates whose modules import each other without circles.
const WITHOUT_CIRCLES: [&str; 4] = ["rdmc", "rdmc-files", "rdmc-bench", "rdmc-cli"];

#[test]
fn imports_inside_a_crate_have_no_circles() {
    for name in WITHOUT_CIRCLES {
        let modules = Modules::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates").join(name).join("src"));
        assert!(modules.0.len() > 10, "{name} has its modules in its sources");
        let found = modules.circle();
        assert!(found.is_none(), "modules of {name} import each other in a circle: {}", found.unwrap().join(" → "));
    }
}

#[test]
fn a_circle_is_found_wherever_it_passes() {
    let found = |sources: &[(&str, &str)]| {
        let names = |path: &str| path.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let module = |(path, text): &(&str, &str)| (names(path), (*text).to_owned());
        Modules(sources.iter().map(module).collect()).circle()
    };
    let two = found(&[("a", "use crate::b::B;"), ("b", "fn f() { crate::a::g() }")]).unwrap();
    assert_eq!(two, ["a", "b", "a"]);
    // A parent and its children may use each other, but their surroundings see them as one.
    assert_eq!(found(&[("a", "use crate::a::x::X;"), ("a/x", "use super::A;"), ("b", "use crate::a::x;")]), None);
    let through = [("a", "mod x;"), ("a/x", "use crate::b::B;"), ("b", "use crate::{c::C, d};"), ("c", ""), ("d", "")];
    assert_eq!(found(&through), None);
    let back = [&through[..3], &[("c", "use crate::{d::{D, E}};"), ("d", "use crate::a::A;")]].concat();
    assert_eq!(found(&back).unwrap(), ["a", "b", "c", "d", "a"]);
    let siblings = [("a", ""), ("a/x", "use super::y::Y;"), ("a/y", "use crate::a::x::X;")];
    assert_eq!(found(&siblings).unwrap(), ["a::x", "a::y", "a::x"]);
    // What the root re-exports is where it comes from.
    let exported = [("", "pub use b::{A as C, B};"), ("a", "use crate::B;"), ("b", "use crate::a;")];
    assert_eq!(found(&exported).unwrap(), ["a", "b", "a"]);
    assert_eq!(
        found(&[("a", "// use crate::b;\n#[cfg(test)]\nmod tests { use crate::b; }"), ("b", "use crate::a;")]),
        None
    );
}

/// The modules of a crate by their paths from its root, with their sources.
struct Modules(BTreeMap<Vec<String>, String>);

impl Modules {
    /// Reads all modules but those of tests.
    fn read(src: &Path) -> Self {
        let mut modules = BTreeMap::new();
        Self::read_below(src, &[], &mut modules);
        Self(modules)
    }

    fn read_below(dir: &Path, parent: &[String], modules: &mut BTreeMap<Vec<String>, String>) {
        for entry in std::fs::read_dir(dir).expect("a directory of the sources") {
            let path = entry.expect("a directory of the sources").path();
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            let is_root = parent.is_empty() && (name == "lib" || name == "main");
            let module: Vec<String> = parent.iter().cloned().chain((!is_root).then_some(name.clone())).collect();
            if path.is_dir() {
                Self::read_below(&path, &module, modules);
            } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests" {
                modules.insert(module, std::fs::read_to_string(&path).expect("it is text"));
            }
        }
    }

    /// Finds modules that import each other in a circle. On each level a module stands for all that is in it.
    fn circle(&self) -> Option<Vec<String>> {
        let mut arrows: BTreeMap<Vec<String>, BTreeSet<Vec<String>>> = BTreeMap::new();
        for (from, text) in &self.0 {
            for path in paths(text, from) {
                let to = self.module_of(&path);
                let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
                // A parent and what is in it may use each other.
                if common < from.len() && common < to.len() {
                    arrows.entry(from[..=common].to_vec()).or_default().insert(to[..=common].to_vec());
                }
            }
        }
        let mut done = BTreeSet::new();
        arrows.keys().find_map(|start| walk(start, &arrows, &mut done, &mut Vec::new()))
    }

    /// Returns the module that a path from the root leads to.
    fn module_of(&self, path: &[String]) -> Vec<String> {
        let known = |len: &usize| self.0.contains_key(&path[..*len]);
        let len = (1..=path.len()).rev().find(known).unwrap_or(0);
        let root = self.0.get(&Vec::new()).map(String::as_str).unwrap_or_default();
        match path.first() {
            Some(name) if len == 0 => {
                let exported =
                    uses(root).into_iter().find(|exported| exported.len() > 1 && exported.last() == Some(name));
                exported.map(|exported| self.module_of(&exported)).unwrap_or_default()
            }
            _ => path[..len].to_vec(),
        }
    }
}

/// Follows the arrows; returns the first circle.
fn walk(
    at: &Vec<String>,
    arrows: &BTreeMap<Vec<String>, BTreeSet<Vec<String>>>,
    done: &mut BTreeSet<Vec<String>>,
    way: &mut Vec<Vec<String>>,
) -> Option<Vec<String>> {
    if let Some(begun) = way.iter().position(|passed| passed == at) {
        return Some(way[begun..].iter().chain([at]).map(|module| module.join("::")).collect());
    }
    if done.contains(at) {
        return None;
    }
    way.push(at.clone());
    let found = arrows.get(at).into_iter().flatten().find_map(|next| walk(next, arrows, done, way));
    way.pop();
    done.insert(at.clone());
    found
}

/// Returns the paths inside its crate that a module uses, from the root. Comments and tests are left out.
fn paths(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let code = code(text);
    for (keyword, levels) in [("crate::", None), ("super::", Some(1))] {
        for (at, _) in code.match_indices(keyword) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|before| before.is_alphanumeric() || before == '_' || before == ':' || before == '$')
            {
                continue;
            }
            let base = levels.map_or(&[][..], |levels| &module[..module.len().saturating_sub(levels)]);
            let expanded = expand(&code[at + keyword.len()..]);
            found.extend(expanded.into_iter().map(|path| base.iter().cloned().chain(path).collect()));
        }
    }
    found
}

/// Returns what a module imports, without what the paths begin with.
fn uses(text: &str) -> Vec<Vec<String>> {
    let code = code(text);
    code.match_indices("use ").flat_map(|(at, keyword)| expand(&code[at + keyword.len()..])).collect()
}

/// Leaves out comments and the modules of tests.
fn code(text: &str) -> String {
    let before_tests = text.find("#[cfg(test)]\nmod tests").map_or(text, |at| &text[..at]);
    let lines = before_tests.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the paths that begin here; several if they end in braces.
fn expand(text: &str) -> Vec<Vec<String>> {
    let len = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    let (name, rest) = text.split_at(len);
    let first = || (!name.is_empty()).then(|| name.to_owned());
    if let Some(inner) = rest.strip_prefix("::") {
        let paths = expand(inner);
        return paths.into_iter().map(|path| first().into_iter().chain(path).collect()).collect();
    }
    if name.is_empty() && rest.starts_with('{') {
        return items(&rest[1..]).into_iter().flat_map(|item| expand(item.trim_start())).collect();
    }
    vec![first().into_iter().collect()]
}

/// Splits what stands in braces at its commas.
fn items(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                items.push(&text[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items
}
