//! Options whose values belong to a library, and options without values.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A value, its name on the command line, and its help.
pub(crate) type Named<T> = (T, &'static str, &'static str);

/// Returns a parser of these values.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(values: &'static [Named<T>]) -> impl TypedValueParser<Value = T> {
    let possible = values.iter().map(|(_, name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(possible).map(|typed| {
        let found = values.iter().find(|(_, name, _)| *name == typed);
        found.expect("only possible values are parsed").0
    })
}

/// Parses the variable of an option that has no value: whether the option counts as typed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch;

impl TypedValueParser for Switch {
    type Value = bool;

    fn parse_ref(
        &self,
        command: &clap::Command,
        option: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<bool, clap::Error> {
        let variable = option.and_then(clap::Arg::get_env).unwrap_or_default().to_string_lossy().into_owned();
        let parse = move |text: &str| match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Ok(true),
            "0" | "false" | "no" | "off" | "" => Ok(false),
            _ => Err(format!("set {variable} to 1 or 0")),
        };
        TypedValueParser::parse_ref(&parse, command, option, value)
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction, Command};

    use super::*;

    #[test]
    fn a_variable_turns_an_option_on_or_off_or_is_refused_by_its_name() {
        let option = Arg::new("json").long("json").action(ArgAction::SetTrue).env("RDMC_JSON");
        let mut command = Command::new("rdmc").arg(option);
        command.build();
        let option = command.get_arguments().find(|option| option.get_id() == "json");
        let parse = |text: &str| Switch.parse_ref(&command, option, OsStr::new(text));
        for (texts, on) in [(["1", "true", "Yes", "on"], true), (["0", "FALSE", "off", ""], false)] {
            texts.iter().for_each(|text| assert_eq!(parse(text).unwrap(), on, "{text:?}"));
        }
        for text in ["maybe", "2", " "] {
            let said = parse(text).unwrap_err().to_string();
            assert!(said.contains("--json") && said.contains("set RDMC_JSON to 1 or 0"), "{said}");
        }
    }
}
