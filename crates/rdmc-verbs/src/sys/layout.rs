//! Compares sizes, offsets and numbers with the headers of libibverbs, if those and a C compiler are installed.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::Command;

use super::{layouts, numbers};

#[test]
fn layouts_and_numbers_are_those_of_the_headers() {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("layout.c"), directory.path().join("layout"));
    let mut ours = String::new();
    let mut body = String::new();
    for (name, size, fields) in layouts() {
        // libibverbs hands out only pointers to these; the fields behind the declared ones are its own.
        if !matches!(name, "ibv_context" | "ibv_cq" | "ibv_qp") {
            writeln!(ours, "{name} {size}").unwrap();
            writeln!(body, "printf(\"{name} %zu\\n\", sizeof(struct {name}));").unwrap();
        }
        for (field, offset) in fields.into_iter().filter(|(field, _)| !field.starts_with('_')) {
            writeln!(ours, "{name}.{field} {offset}").unwrap();
            let field_of_c = match (name, field) {
                ("ibv_send_wr", "remote_addr" | "rkey") => format!("wr.rdma.{field}"),
                _ => field.into(),
            };
            writeln!(body, "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field_of_c}));").unwrap();
        }
    }
    let statuses = crate::status::STATUSES.iter().zip(0..).map(|((name, _), value)| (*name, value));
    for (name, value) in numbers().into_iter().chain(statuses) {
        writeln!(ours, "{name} {value}").unwrap();
        writeln!(body, "printf(\"{name} %d\\n\", (int){name});").unwrap();
    }
    let includes = "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n";
    std::fs::write(&source, format!("{includes}int main(void) {{\n{body}}}\n")).unwrap();

    let header = Command::new("cc").args(["-E", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]).output();
    if !header.is_ok_and(|output| output.status.success()) {
        let reason = "no C compiler, or no headers of libibverbs (package libibverbs-dev)";
        let required = std::env::var("RDMC_TEST_REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|required| required == "layouts"),
            "RDMC_TEST_REQUIRE names layouts: {reason}"
        );
        // `println!` would be captured.
        writeln!(std::io::stdout(), "skipped: {reason}").unwrap();
        return;
    }
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let theirs = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    assert_eq!(ours.lines().collect::<Vec<_>>(), theirs.lines().collect::<Vec<_>>());
}
