//! What the guest's shell reads: words quoted so that it takes them as they are.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Result, ensure};

/// A script for `sh`, built command by command.
#[derive(Debug, Default)]
pub(crate) struct Script {
    text: Vec<u8>,
}

impl Script {
    /// Writes the script that turns into `command`, with exactly this directory and environment.
    pub(crate) fn of_command(
        directory: &Path,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        command: &[OsString],
    ) -> Result<Self> {
        let program = command.first().map(OsString::as_os_str).unwrap_or_default();
        // env would take it for a variable.
        ensure!(!program.as_bytes().contains(&b'='), "the lab cannot run {program:?}, for its name contains \"=\"");
        let mut script = Self::default();
        script.raw("cd -- ").word(directory.as_os_str()).raw(" || exit 125\n");
        // Not by export: the names of variables need not be names to the shell.
        script.raw("exec /usr/bin/env -i");
        for (name, value) in environment {
            let mut pair = name;
            pair.push("=");
            pair.push(value);
            script.raw(" ").word(&pair);
        }
        for word in command {
            script.raw(" ").word(word);
        }
        script.raw("\n");
        Ok(script)
    }

    /// Adds an assignment to a variable.
    pub(crate) fn assign(&mut self, name: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.raw(name).raw("=").word(value.as_ref()).raw("\n")
    }

    /// Adds an assignment to the positional parameters.
    pub(crate) fn assign_parameters(&mut self, values: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        self.raw("set --");
        for value in values {
            self.raw(" ").word(value.as_ref());
        }
        self.raw("\n")
    }

    /// The bytes of the script.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.text
    }

    fn raw(&mut self, text: &str) -> &mut Self {
        self.text.extend_from_slice(text.as_bytes());
        self
    }

    /// Adds a word in single quotes, within which only a single quote means something.
    fn word(&mut self, word: &OsStr) -> &mut Self {
        self.text.push(b'\'');
        for &byte in word.as_bytes() {
            if byte == b'\'' {
                self.raw(r"'\''");
            } else {
                self.text.push(byte);
            }
        }
        self.text.push(b'\'');
        self
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;
    use std::process::{Command, Stdio};

    use super::*;

    /// What sh and its children write when they run the script.
    fn output(script: &Script) -> Vec<u8> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, script.as_bytes()).unwrap();
        let output = Command::new("sh").arg(file.path()).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }

    fn awkward_words() -> Vec<OsString> {
        let mut words: Vec<OsString> = [
            "", " ", "a b", "'", "it's", "''", "\"", "$HOME", "`id`", "\\", "\\'", "a\nb\n", "*", "-n", "--", "a=b",
            "ä",
        ]
        .map(OsString::from)
        .into();
        words.push(OsString::from_vec((1..=255).collect()));
        words
    }

    #[test]
    fn a_command_gets_its_arguments_byte_for_byte() {
        let mut command: Vec<OsString> = ["printf", "%s\\0", "first"].map(OsString::from).into();
        command.extend(awkward_words());
        let environment = std::env::var_os("PATH").map(|path| (OsString::from("PATH"), path));
        let script = Script::of_command(Path::new("/"), environment, &command).unwrap();
        let mut expected = Vec::new();
        for word in &command[2..] {
            expected.extend_from_slice(word.as_bytes());
            expected.push(0);
        }
        assert_eq!(output(&script), expected);
    }

    #[test]
    fn a_command_gets_its_environment_and_no_other() {
        let name_of_no_shell_variable = OsString::from("a.b%%");
        let environment = awkward_words().into_iter().map(|value| (name_of_no_shell_variable.clone(), value));
        for pair in environment {
            let command = ["/usr/bin/env", "-0"].map(OsString::from);
            let expected = [pair.0.as_bytes(), b"=", pair.1.as_bytes(), b"\0"].concat();
            let script = Script::of_command(Path::new("/"), [pair], &command).unwrap();
            assert_eq!(output(&script), expected);
        }
    }

    #[test]
    fn a_command_runs_in_its_directory() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("-a 'b'");
        std::fs::create_dir(&directory).unwrap();
        let script = Script::of_command(&directory, [], &["/bin/pwd".into()]).unwrap();
        assert_eq!(output(&script), [directory.as_os_str().as_bytes(), b"\n"].concat());
    }

    #[test]
    fn a_program_that_looks_like_a_variable_is_refused() {
        Script::of_command(Path::new("/"), [], &["a=b".into()]).unwrap_err();
    }

    #[test]
    fn settings_are_read_back_as_they_were() {
        let mut script = Script::default();
        script.assign("one", "it's $1").assign_parameters(["a b", "c'd"]);
        script.raw("printf '%s|' \"$one\" \"$#\" \"$@\"");
        assert_eq!(output(&script), b"it's $1|2|a b|c'd|");
    }
}
