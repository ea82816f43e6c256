//! The reference of all commands and options in docs/CLI.md, made from the definition of the command line.
//!
//! `RDMC_WRITE_DOCS=1 cargo test --workspace --bin rdmc reference` writes it anew.

use std::fmt::Write;
use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory};

use crate::cli::Cli;

#[test]
fn the_reference_is_that_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/CLI.md");
    let page = std::fs::read_to_string(&path).expect("docs/CLI.md is there");
    let (before, rest) = page.split_once(BEGIN).expect("docs/CLI.md says where the reference begins");
    let (stood, after) = rest.split_once(END).expect("docs/CLI.md says where the reference ends");
    let made = format!("\n\n{}\n", reference());
    if std::env::var_os("RDMC_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{made}{END}{after}")).expect("docs/CLI.md can be written");
        return;
    }
    assert!(
        made == stood,
        "docs/CLI.md is not that of the program: RDMC_WRITE_DOCS=1 cargo test --workspace --bin rdmc reference"
    );
}

/// Describes every command that is not hidden.
fn reference() -> String {
    let mut program = Cli::command();
    program.build();
    let mut text = String::new();
    describe(&mut text, &program, "rdmc");
    text.trim_end().to_owned()
}

/// Describes the subcommands of `command`, and theirs.
fn describe(text: &mut String, command: &Command, name: &str) {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
    {
        let name = format!("{name} {}", subcommand.get_name());
        let about = subcommand.get_long_about().or(subcommand.get_about()).map(ToString::to_string).unwrap_or_default();
        let usage = subcommand.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let _ = write!(text, "### `{name}`\n\n{}\n\n```text\n{usage}\n```\n\n", sentence(&about));
        let arguments: Vec<&Arg> = subcommand.get_arguments().filter(|argument| is_shown(argument)).collect();
        if !arguments.is_empty() {
            text.push_str("| option | default | variable | meaning |\n|---|---|---|---|\n");
            arguments.into_iter().for_each(|argument| row(text, argument));
            text.push('\n');
        }
        describe(text, subcommand, &name);
    }
}

/// Tells whether an argument is worth a row: all commands have --help and --version.
fn is_shown(argument: &Arg) -> bool {
    !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "version")
}

fn row(text: &mut String, argument: &Arg) {
    let default: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = if takes_value(argument) { code(&default.join(",")) } else { String::new() };
    let variable = argument.get_env().map(|name| code(&name.to_string_lossy())).unwrap_or_default();
    let about = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = sentence(&about);
    if let Some(choices) = choices(argument) {
        let _ = write!(meaning, " {choices}");
    }
    let _ = writeln!(text, "| {} | {} | {variable} | {} |", cell(&flags(argument)), cell(&default), cell(&meaning));
}

/// Names an argument as it is written.
fn flags(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    let value = names.iter().map(|name| name.to_string()).collect::<Vec<_>>().join(" ");
    let long = argument.get_long().map(|long| format!("--{long}"));
    let short = argument.get_short().map(|short| format!("-{short}"));
    let flags: Vec<String> = [long, short].into_iter().flatten().map(|flag| code(&flag)).collect();
    match (flags.is_empty(), takes_value(argument)) {
        (true, _) => code(&value),
        (false, true) => format!("{} {}", flags.join(", "), code(&value)),
        (false, false) => flags.join(", "),
    }
}

fn takes_value(argument: &Arg) -> bool {
    matches!(argument.get_action(), ArgAction::Set | ArgAction::Append) && argument.get_value_names().is_some()
}

/// Lists the values that an argument may have, with their meanings where they have any.
fn choices(argument: &Arg) -> Option<String> {
    let values: Vec<_> = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    if values.is_empty() || !takes_value(argument) {
        return None;
    }
    let told = values.iter().map(|value| match value.get_help() {
        Some(help) => format!("{}: {help}", code(value.get_name())),
        None => code(value.get_name()),
    });
    Some(format!("Values: {}.", told.collect::<Vec<_>>().join("; ")))
}

/// Joins the lines of a help text into a paragraph that ends with a full stop.
fn sentence(help: &str) -> String {
    let joined = help.split_whitespace().collect::<Vec<_>>().join(" ");
    if joined.ends_with(['.', ':', '?']) || joined.is_empty() { joined } else { format!("{joined}.") }
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Escapes what would end the cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

const BEGIN: &str = "<!-- The reference of commands, made by a test of rdmc-cli: do not edit. -->";
const END: &str = "<!-- End of the reference of commands. -->";
