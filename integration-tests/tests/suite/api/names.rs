//! The public names of crates, read from their sources.
//!
//! Names that a macro generates are not seen. Public imports of all names of a module are not understood: the test
//! panics.

use std::collections::BTreeMap;
use std::path::Path;

use syn::ext::IdentExt;
use syn::{Attribute, Fields, ImplItem, Item, Meta, TraitItem, Type, UseTree, Visibility};

/// A name at the root of a crate, or in one of its public modules.
#[derive(Debug)]
pub(super) struct Entry {
    /// The name, after those of its modules.
    pub(super) name: String,
    /// The crate, module and name of the definition.
    pub(super) defined: (String, Vec<String>, String),
    pub(super) kind: &'static str,
    pub(super) is_non_exhaustive: bool,
    /// The names of its fields, variants, methods and associated items, in order.
    pub(super) names: Vec<String>,
}

/// Crates by their names, as their modules with the items of each.
pub(super) struct Crates(BTreeMap<String, BTreeMap<Vec<String>, Vec<Item>>>);

impl Crates {
    /// Reads crates of the workspace.
    pub(super) fn read(dir: &Path, names: &[&str]) -> Self {
        let read = |name: &&str| {
            let mut modules = BTreeMap::new();
            let src = dir.join(name).join("src");
            read_module(&src.join("lib.rs"), &src, Vec::new(), &mut modules);
            (name.replace('-', "_"), modules)
        };
        Self(names.iter().map(read).collect())
    }

    /// Takes crates as their modules with their sources.
    pub(super) fn of(crates: &[(&str, &[(&str, &str)])]) -> Self {
        let module = |(path, text): &(&str, &str)| {
            let path = path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
            (path, syn::parse_file(text).expect("it is Rust").items)
        };
        let read = |(name, modules): &(&str, &[(&str, &str)])| {
            ((*name).to_owned(), modules.iter().map(module).collect::<BTreeMap<_, _>>())
        };
        Self(crates.iter().map(read).collect())
    }

    /// Lists the public names of a crate, ordered.
    pub(super) fn exports(&self, name: &str) -> Vec<Entry> {
        let mut entries = Vec::new();
        self.exports_of(&name.replace('-', "_"), &[], &mut entries);
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries
    }

    fn exports_of(&self, krate: &str, module: &[String], entries: &mut Vec<Entry>) {
        for item in self.0[krate].get(module).into_iter().flatten() {
            match item {
                Item::Use(import) if is_public(&import.vis) && !is_hidden(&import.attrs) => {
                    for (name, path) in imports(&import.tree) {
                        let (krate, defined, item) = self.find(krate, module, &path);
                        entries.push(self.entry(module, &name, (krate, defined, item)));
                    }
                }
                Item::Mod(inner) if is_public(&inner.vis) && !is_hidden(&inner.attrs) => {
                    self.exports_of(krate, &[module, &[inner.ident.to_string()]].concat(), entries);
                }
                item => {
                    let Some((name, visibility, attributes)) = named(item) else { continue };
                    if is_public(visibility) && !is_hidden(attributes) {
                        entries.push(self.entry(module, &name, (krate.to_owned(), module.to_owned(), item)));
                    }
                }
            }
        }
    }

    /// Finds the definition to which a path in a module leads.
    fn find(&self, krate: &str, module: &[String], path: &[String]) -> (String, Vec<String>, &Item) {
        let wrong = format!("the path {} in {krate}::{} is understood", path.join("::"), module.join("::"));
        let (first, rest) = path.split_first().expect(&wrong);
        let (krate, mut place, mut rest) = match first.as_str() {
            "crate" => (krate, Vec::new(), rest),
            "self" => (krate, module.to_owned(), rest),
            "super" => (krate, module[..module.len() - 1].to_owned(), rest),
            other if self.0.contains_key(other) && other != krate => (other, Vec::new(), rest),
            _ => (krate, module.to_owned(), path),
        };
        while let [step, more @ ..] = rest
            && !more.is_empty()
        {
            place.push(step.clone());
            rest = more;
        }
        let name = rest.first().expect(&wrong);
        let items = self.0[krate].get(&place).expect(&wrong);
        if let Some(item) = items.iter().find(|item| named(item).is_some_and(|(other, ..)| other == *name)) {
            return (krate.to_owned(), place, item);
        }
        let imported = items.iter().find_map(|item| match item {
            Item::Use(import) => imports(&import.tree).into_iter().find(|(other, _)| other == name),
            _ => None,
        });
        let (_, path) = imported.expect(&wrong);
        self.find(krate, &place, &path)
    }

    fn entry(&self, module: &[String], name: &str, (krate, defined, item): (String, Vec<String>, &Item)) -> Entry {
        let (own, _, attributes) = named(item).expect("it was found by its name");
        let mut names = Vec::new();
        let kind = match item {
            Item::Struct(item) => {
                names.extend(fields(&item.fields, is_public));
                "struct"
            }
            Item::Enum(item) => {
                for variant in item.variants.iter().filter(|variant| !is_hidden(&variant.attrs)) {
                    names.push(variant.ident.to_string());
                    names.extend(fields(&variant.fields, |_| true).map(|field| format!("{}.{field}", variant.ident)));
                }
                "enum"
            }
            Item::Trait(item) => {
                names.extend(
                    item.items
                        .iter()
                        .filter_map(|item| match item {
                            TraitItem::Fn(item) => Some((&item.attrs, format!("{}()", item.sig.ident))),
                            TraitItem::Const(item) => Some((&item.attrs, item.ident.to_string())),
                            TraitItem::Type(item) => Some((&item.attrs, item.ident.to_string())),
                            _ => None,
                        })
                        .filter(|(attributes, _)| !is_hidden(attributes))
                        .map(|(_, name)| name),
                );
                "trait"
            }
            Item::Fn(_) => "function",
            Item::Const(_) | Item::Static(_) => "constant",
            Item::Type(_) => "alias",
            _ => panic!("{name} is of a kind that is not understood"),
        };
        names.extend(self.inherent(&krate, &defined, &own));
        names.sort();
        names.dedup();
        let name = [module, &[name.to_owned()]].concat().join("::");
        let is_non_exhaustive = attributes.iter().any(|attribute| attribute.path().is_ident("non_exhaustive"));
        Entry { name, defined: (krate, defined, own), kind, is_non_exhaustive, names }
    }

    /// Lists the public methods and constants of a type. Where a crate has several types of one name, only those count
    /// that stand beside it.
    fn inherent(&self, krate: &str, module: &[String], name: &str) -> Vec<String> {
        let modules = &self.0[krate];
        let defines = |item: &&Item| {
            matches!(item, Item::Struct(_) | Item::Enum(_)) && named(item).is_some_and(|(own, ..)| own == name)
        };
        let is_unique = modules.values().flatten().filter(defines).count() < 2;
        let near = modules.iter().filter(|(other, _)| is_unique || other[..] == *module);
        let blocks = near.flat_map(|(_, items)| items).filter_map(|item| match item {
            Item::Impl(block) if block.trait_.is_none() && !is_hidden(&block.attrs) => Some(block),
            _ => None,
        });
        let own = blocks.filter(|block| match &*block.self_ty {
            Type::Path(path) => path.path.segments.last().is_some_and(|last| last.ident == name),
            _ => false,
        });
        let items = own.flat_map(|block| &block.items).filter_map(|item| match item {
            ImplItem::Fn(item) => Some((&item.vis, &item.attrs, format!("{}()", item.sig.ident))),
            ImplItem::Const(item) => Some((&item.vis, &item.attrs, item.ident.to_string())),
            _ => None,
        });
        items
            .filter(|(visibility, attributes, _)| is_public(visibility) && !is_hidden(attributes))
            .map(|(.., name)| name)
            .collect()
    }
}

/// Reads a module and those below it, except those of tests.
fn read_module(file: &Path, dir: &Path, path: Vec<String>, modules: &mut BTreeMap<Vec<String>, Vec<Item>>) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let items = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display())).items;
    for item in &items {
        let Item::Mod(inner) = item else { continue };
        if inner.content.is_none() && !is_hidden(&inner.attrs) {
            let name = inner.ident.unraw().to_string();
            let path = [&path[..], std::slice::from_ref(&name)].concat();
            read_module(&dir.join(&name).with_extension("rs"), &dir.join(&name), path, modules);
        }
    }
    modules.insert(path, items);
}

/// Returns the name, visibility and attributes of an item that defines a name other than that of a module.
fn named(item: &Item) -> Option<(String, &Visibility, &[Attribute])> {
    let (ident, visibility, attributes) = match item {
        Item::Struct(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Enum(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Union(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Trait(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Type(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Const(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Static(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Fn(item) => (&item.sig.ident, &item.vis, &item.attrs),
        _ => return None,
    };
    Some((ident.to_string(), visibility, attributes))
}

/// Lists the names that an import brings, with their paths.
fn imports(tree: &UseTree) -> Vec<(String, Vec<String>)> {
    match tree {
        UseTree::Path(path) => {
            let first = path.ident.to_string();
            let below = imports(&path.tree).into_iter();
            below.map(|(name, rest)| (name, [std::slice::from_ref(&first), &rest[..]].concat())).collect()
        }
        UseTree::Name(name) => vec![(name.ident.to_string(), vec![name.ident.to_string()])],
        UseTree::Rename(name) => vec![(name.rename.to_string(), vec![name.ident.to_string()])],
        UseTree::Group(group) => group.items.iter().flat_map(imports).collect(),
        UseTree::Glob(_) => vec![("*".to_owned(), vec!["*".to_owned()])],
    }
}

/// Lists the names of fields; those of tuples are their places.
fn fields(fields: &Fields, is_shown: impl Fn(&Visibility) -> bool) -> impl Iterator<Item = String> {
    let shown = fields.iter().enumerate().filter(move |(_, field)| is_shown(&field.vis) && !is_hidden(&field.attrs));
    shown.map(|(place, field)| field.ident.as_ref().map_or_else(|| place.to_string(), ToString::to_string))
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Tells whether an item is hidden from the documentation, or exists only in tests.
fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => {
            let tokens = list.tokens.to_string();
            list.path.is_ident("doc") && tokens == "hidden" || list.path.is_ident("cfg") && tokens == "test"
        }
        _ => false,
    })
}
