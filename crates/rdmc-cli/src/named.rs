//! Options whose values belong to a library.

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
