//! Makes the two parts of the lab: the kernel, a program, and the layer, a directory of unpacked packages.
//!
//! Both come from Debian's archive by way of apt, so that nothing is fetched from elsewhere and signatures are checked.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::cache::{Cache, CacheLock};

/// Where the parts are.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The kernel, a program.
    pub(crate) kernel: PathBuf,
    /// The directory that is laid over the host's root directory.
    pub(crate) layer: PathBuf,
}

/// A replacement of the one place in a file that reads `old`.
struct Edit {
    file: &'static str,
    old: &'static str,
    new: &'static str,
}

/// Finds the parts in the cache, or makes them.
pub(crate) fn parts(cache: &Cache) -> Result<Parts> {
    let mut inputs = vec![KERNEL_RECIPE, KERNEL_SOURCE, KERNEL_CONFIG, KERNEL_CLOCK];
    inputs.extend(KERNEL_EDITS.iter().flat_map(|edit| [edit.file, edit.old, edit.new]));
    let kernel = cache.entry("kernel", &inputs);
    // The libraries must fit to those of the host.
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let layer = cache.entry("layer", &[LAYER_RECIPE, &LAYER_PACKAGES.join(" "), &release]);
    if !layer.exists() || !kernel.exists() {
        require_programs()?;
        let lock = cache.lock()?;
        if !layer.exists() {
            build_layer(cache, &lock, &layer).context("cannot unpack the lab's packages")?;
        }
        if !kernel.exists() {
            build_kernel(cache, &lock, &kernel).context("cannot build the lab's kernel")?;
        }
    }
    Ok(Parts { kernel, layer })
}

/// Unpacks the packages into a directory.
fn build_layer(cache: &Cache, lock: &CacheLock, result: &Path) -> Result<()> {
    let work = cache.build_directory(lock)?;
    let layer = work.path().join("layer");
    for directory in ["bin", "sbin", "lib", "lib64"] {
        // Links as on the host: a directory would hide the host's.
        fs::create_dir_all(layer.join("usr").join(directory))?;
        std::os::unix::fs::symlink(format!("usr/{directory}"), layer.join(directory))?;
    }
    for package in download(&work.path().join("packages"), &LAYER_PACKAGES)? {
        let mut unpack = Command::new("tar");
        unpack.args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--directory"]).arg(&layer);
        pipeline(&mut [package_content(&package), unpack])?;
    }
    for directory in ["usr/share/doc", "usr/share/man", "usr/share/lintian"] {
        fs::remove_dir_all(layer.join(directory)).with_context(|| format!("no {directory} in the packages"))?;
    }
    ensure!(layer.join(BUSYBOX).exists(), "no {BUSYBOX} in the packages");
    fs::rename(&layer, result)?;
    Ok(())
}

/// Compiles the kernel.
fn build_kernel(cache: &Cache, lock: &CacheLock, result: &Path) -> Result<()> {
    let work = cache.build_directory(lock)?;
    let tree = unpack_kernel(work.path())?;

    fs::write(tree.join(KERNEL_CLOCK_FILE), KERNEL_CLOCK)?;
    for edit in &KERNEL_EDITS {
        let file = tree.join(edit.file);
        let text = fs::read_to_string(&file).with_context(|| format!("no {} in the source", edit.file))?;
        ensure!(text.matches(edit.old).count() == 1, "{} has not {:?} once", edit.file, edit.old);
        fs::write(&file, text.replace(edit.old, edit.new))?;
    }

    let wanted = work.path().join("wanted.config");
    fs::write(&wanted, KERNEL_CONFIG)?;
    let mut configure = make(&tree);
    configure.arg("--silent").env("KCONFIG_ALLCONFIG", &wanted).arg("allnoconfig");
    pipeline(&mut [configure])?;
    let missing = missing_options(KERNEL_CONFIG, &fs::read_to_string(tree.join(".config"))?);
    ensure!(missing.is_empty(), "the kernel does not take these options: {}", missing.join(", "));

    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    eprintln!("lab: compiling {KERNEL_SOURCE} as user-mode Linux, {jobs} files at a time (minutes)");
    let mut compile = make(&tree);
    compile.arg(format!("--jobs={jobs}")).arg("linux");
    logged(&mut compile, &cache.compile_log())?;

    let stripped = work.path().join("linux");
    let mut strip = Command::new("strip");
    // The names of functions stay: profilers on the host show them.
    strip.args(["--strip-debug", "-o"]).arg(&stripped).arg(tree.join("linux"));
    pipeline(&mut [strip])?;
    fs::rename(&stripped, result)?;
    Ok(())
}

/// Downloads and unpacks the kernel's source, without most of what is not compiled; returns its directory.
fn unpack_kernel(work: &Path) -> Result<PathBuf> {
    let packages = work.join("source");
    let mut debs = download(&packages, &[KERNEL_SOURCE])?;
    let package = debs.pop().context("apt-get has downloaded nothing")?;
    eprintln!("lab: unpacking the kernel's source");
    let mut archive = Command::new("tar");
    archive.args(["--extract", "--to-stdout", "--wildcards", "*/linux-source-*.tar.xz"]);
    let mut unpack = Command::new("tar");
    unpack.args(["--extract", "--xz", "--no-same-owner", "--directory"]).arg(work);
    unpack.args(KERNEL_SOURCE_UNUSED.iter().map(|pattern| format!("--exclude=*/{pattern}")));
    pipeline(&mut [package_content(&package), archive, unpack])?;
    fs::remove_dir_all(&packages)?;
    let tree = work.join(KERNEL_SOURCE);
    ensure!(tree.join("arch/um").is_dir(), "the package {KERNEL_SOURCE} contains no {KERNEL_SOURCE}/arch/um");
    Ok(tree)
}

/// Downloads packages into a new directory; returns the files.
fn download(directory: &Path, packages: &[&str]) -> Result<Vec<PathBuf>> {
    eprintln!("lab: downloading {}", packages.join(" "));
    fs::create_dir_all(directory)?;
    let mut apt = Command::new("apt-get");
    // apt would drop root's rights and then could not write here.
    apt.args(["--quiet=2", "--option=APT::Sandbox::User=root", "download"]).args(packages).current_dir(directory);
    pipeline(&mut [apt]).context("cannot download packages; is `apt-get update` due?")?;
    let mut files =
        fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// The command that writes a package's content as an archive.
fn package_content(package: &Path) -> Command {
    let mut command = Command::new("dpkg-deb");
    command.arg("--fsys-tarfile").arg(package);
    command
}

fn make(tree: &Path) -> Command {
    let mut command = Command::new("make");
    command.arg("ARCH=um").current_dir(tree);
    // A make or cargo that started this may have left a job server's address.
    command.env_remove("MAKEFLAGS").env_remove("MFLAGS").env("LC_ALL", "C");
    command
}

/// Runs commands, each reading what the one before it writes.
fn pipeline(commands: &mut [Command]) -> Result<()> {
    let count = commands.len();
    let mut children = Vec::with_capacity(count);
    let mut input = Stdio::null();
    for (i, command) in commands.iter_mut().enumerate() {
        command.stdin(input);
        // The last one's words are progress, which belongs on stderr.
        command.stdout(if i + 1 < count { Stdio::piped() } else { Stdio::from(io::stderr()) });
        let mut child = command.spawn().with_context(|| format!("cannot run {}", command.get_program().display()))?;
        input = child.stdout.take().map_or_else(Stdio::null, Stdio::from);
        children.push(child);
    }
    // All are waited for before the first failure is told.
    let statuses = children.iter_mut().map(std::process::Child::wait).collect::<io::Result<Vec<_>>>()?;
    for (command, status) in commands.iter().zip(statuses) {
        ensure!(status.success(), "{command:?} ended with {status}");
    }
    Ok(())
}

/// Runs a command with its output in a file, which stays there on failure only.
fn logged(command: &mut Command, log: &Path) -> Result<()> {
    let (reader, writer) = io::pipe()?;
    let mut child = command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // Our copies of the writing end would keep the loop below from ending.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut file = File::create(log)?;
    let mut tail = VecDeque::new();
    for (line, count) in BufReader::new(reader).split(b'\n').zip(1_usize..) {
        let line = line?;
        file.write_all(&line)?;
        file.write_all(b"\n")?;
        if count % LINES_PER_PROGRESS == 0 {
            eprintln!("lab: {count} steps done");
        }
        if tail.len() == LOG_TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(line);
    }
    let status = child.wait()?;
    if !status.success() {
        for line in tail {
            eprintln!("{}", String::from_utf8_lossy(&line));
        }
        bail!("compiling ended with {status}; all of its log is in {}", log.display());
    }
    fs::remove_file(log)?;
    Ok(())
}

/// Lists the lines of `wanted` that the resulting configuration does not have.
fn missing_options<'a>(wanted: &'a str, result: &str) -> Vec<&'a str> {
    wanted
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .filter(|line| !result.lines().any(|other| other == *line))
        .collect()
}

/// Fails with a list of all programs that are not there.
fn require_programs() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut missing: Vec<(&str, &str)> = PROGRAMS
        .into_iter()
        .filter(|(program, _)| !std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
        .collect();
    if !Path::new(C_HEADER).is_file() {
        missing.push((C_HEADER, "libc6-dev"));
    }
    if missing.is_empty() {
        return Ok(());
    }
    let (programs, mut packages): (Vec<_>, Vec<_>) = missing.into_iter().unzip();
    packages.dedup();
    bail!(
        "missing: {}; install them with: apt-get install --no-install-recommends {}",
        programs.join(", "),
        packages.join(" ")
    )
}

/// Busybox in the layer.
pub(crate) const BUSYBOX: &str = "usr/bin/busybox";

/// To be changed with code that makes a different kernel of the same inputs.
const KERNEL_RECIPE: &str = "1";
/// The package with the kernel's source, and the directory in it.
const KERNEL_SOURCE: &str = "linux-source-6.12";
const KERNEL_CONFIG: &str = include_str!("../../lab/kernel.config");
/// What is no option of user-mode Linux and must be changed in its source.
const KERNEL_EDITS: [Edit; 8] = [
    // The timer's frequency. Two processes that poll a completion queue in a loop share the one processor by its tick:
    // with 100 Hz a message between them takes 20 ms, with 1000 Hz 2 ms.
    Edit {
        file: "arch/um/Kconfig",
        old: "config HZ\n\tint\n\tdefault 100\n",
        new: "config HZ\n\tint\n\tdefault 1000\n",
    },
    // The room for the floating-point registers of a process. The host takes all of them or none, and processors with
    // AMX have 11008 bytes; with less the first process dies at once. The stacks must hold them too: KERNEL_STACK_ORDER.
    Edit {
        file: "arch/x86/um/user-offsets.c",
        old: "DEFINE_LONGS(HOST_FP_SIZE, 2696);",
        new: "DEFINE_LONGS(HOST_FP_SIZE, 12288);",
    },
    // The scheduler's clock, and so that of processor time, which otherwise advances by ticks only.
    Edit {
        file: "arch/um/kernel/time.c",
        old: "void __init time_init(void)\n{",
        new: "unsigned long long notrace sched_clock(void)\n{\n\treturn os_nsecs();\n}\n\nvoid __init time_init(void)\n{",
    },
    // The clock of processes: see KERNEL_CLOCK.
    Edit {
        file: "arch/um/kernel/time.c",
        old: "\t(*timer_clockevent.event_handler)(&timer_clockevent);\n",
        new: "\t(*timer_clockevent.event_handler)(&timer_clockevent);\n\tlab_clock_tick();\n",
    },
    Edit {
        file: "arch/um/kernel/time.c",
        old: "static irqreturn_t um_timer(",
        new: "void lab_clock_tick(void);\n\nstatic irqreturn_t um_timer(",
    },
    Edit {
        file: "arch/x86/um/vdso/vma.c",
        old: "static int __init init_vdso(void)\n{",
        new: "#include \"lab-clock.h\"\n\n\
              void lab_clock_tick(void);\nvoid lab_clock_tick(void)\n{\n\
              \tif (vdsop)\n\t\tlab_clock_write(page_address(*vdsop) + LAB_CLOCK_OFFSET);\n}\n\n\
              static int __init init_vdso(void)\n{",
    },
    Edit {
        file: "arch/x86/um/vdso/vma.c",
        old: "\tBUG_ON(vdso_end - vdso_start > PAGE_SIZE);",
        new: "\tBUG_ON(vdso_end - vdso_start > LAB_CLOCK_OFFSET);",
    },
    Edit {
        file: "arch/x86/um/vdso/um_vdso.c",
        old: "int __vdso_clock_gettime(clockid_t clock, struct __kernel_old_timespec *ts)\n{\n\tlong ret;\n",
        new: "#define LAB_CLOCK_VDSO\n#include \"lab-clock.h\"\n\n\
              int __vdso_clock_gettime(clockid_t clock, struct __kernel_old_timespec *ts)\n{\n\tlong ret;\n\n\
              \tif (lab_clock_read(clock, ts))\n\t\treturn 0;\n",
    },
];
/// A clock that costs no system call, as processes have it on all other machines.
const KERNEL_CLOCK: &str = include_str!("../../lab/lab-clock.h");
const KERNEL_CLOCK_FILE: &str = "arch/x86/um/vdso/lab-clock.h";
/// What is not unpacked, two thirds of the source. The files that make up the configuration's menus must stay.
const KERNEL_SOURCE_UNUSED: [&str; 22] = [
    "*.dts",
    "*.dtsi",
    "*.json",
    "*.rst",
    "*.yaml",
    "arch/arm/*.[ch]",
    "arch/arm64/*.[ch]",
    "arch/mips/*.[ch]",
    "arch/powerpc/*.[ch]",
    "drivers/accel/*.[ch]",
    "drivers/clk/*.[ch]",
    "drivers/gpu/*.[ch]",
    "drivers/iio/*.[ch]",
    "drivers/media/*.[ch]",
    "drivers/net/ethernet/*.[ch]",
    "drivers/net/wireless/*.[ch]",
    "drivers/scsi/*.[ch]",
    "drivers/staging/*.[ch]",
    "drivers/usb/*.[ch]",
    "drivers/video/*.[ch]",
    "sound/*.[ch]",
    "tools/testing/*",
];

/// To be changed with code that makes a different layer of the same packages.
const LAYER_RECIPE: &str = "1";
/// What the guest has even where the host has not installed it: its own tools, those of RDMA, and their libraries.
const LAYER_PACKAGES: [&str; 20] = [
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libcap2",
    "libelf1",
    "libibumad3",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "libtirpc3",
    "libxtables12",
    "perftest",
    "rdmacm-utils",
];

/// What building takes, and the Debian packages that have it.
const PROGRAMS: [(&str, &str); 12] = [
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("gcc", "gcc"),
    ("ld", "binutils"),
    ("strip", "binutils"),
    ("make", "make"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("setpriv", "util-linux"),
];
const C_HEADER: &str = "/usr/include/stdio.h";

const LINES_PER_PROGRESS: usize = 200;
const LOG_TAIL_LINES: usize = 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_do_not_come_out_as_wanted_are_missing() {
        let wanted = "# CONFIG_REMARK=y\n\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=\"c\"\n";
        assert_eq!(missing_options(wanted, "CONFIG_A=y\nCONFIG_AB=y\nCONFIG_C=\"c\"\n"), ["CONFIG_B=y"]);
        assert_eq!(missing_options(wanted, "CONFIG_B=y\n# CONFIG_A is not set\n"), ["CONFIG_A=y", "CONFIG_C=\"c\""]);
    }

    #[test]
    fn a_pipeline_fails_if_any_of_its_commands_does() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        pipeline(&mut [shell("echo 7"), shell("read x; exit $((x - 7))")]).unwrap();
        pipeline(&mut [shell("echo 7; exit 1"), shell("read x; exit $((x - 7))")]).unwrap_err();
        pipeline(&mut [shell("echo 7"), shell("read x; exit $x")]).unwrap_err();
        pipeline(&mut [Command::new("/nonexistent")]).unwrap_err();
    }

    #[test]
    fn a_log_is_kept_on_failure_only() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        logged(Command::new("sh").args(["-c", "echo out; echo err >&2"]), &log).unwrap();
        assert!(!log.exists());
        logged(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 1"]), &log).unwrap_err();
        assert_eq!(fs::read_to_string(&log).unwrap(), "out\nerr\n");
    }
}
