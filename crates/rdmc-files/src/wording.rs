//! Names of a program's parts and settings in messages.

/// Names of a program's parts and settings in messages.
///
/// Messages say what to do: which setting to change, what to run again. By default a setting is called by its method in
/// this crate. A program sets the names that its users know. Some texts travel: the sender's user reads a receiver's
/// refusal.
///
/// # Examples
/// ```
/// let mut wording = rdmc_files::Wording::default();
/// wording.pool_bytes_max = "pool.size of service.toml";
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wording {
    /// The program that sends: `the sender`.
    pub sender: &'static str,
    /// The program that receives: `the receiver`.
    pub receiver: &'static str,
    /// What to check if nothing listens at a receiver's address: `does the receiver run there?`.
    pub not_listening: &'static str,
    /// Where receivers listen by default, as a sentence; `None` if there is no default.
    pub default_address: Option<&'static str>,
    /// The directory of a receiver: `the directory`.
    pub directory: &'static str,
    /// What to do if this user cannot write to the directory: `let this user write there, or choose another one`.
    pub choose_directory: &'static str,
    /// Why an existing file makes a receiver refuse: `nothing is replaced`.
    pub no_overwrite: &'static str,
    /// The setting that bounds registered memory: `pool_bytes_max`.
    pub pool_bytes_max: &'static str,
    /// The sender's setting that waits for receivers: `wait(true)`.
    pub wait: &'static str,
    /// The sender's setting for slow receivers: `evict_after of the sender`.
    pub evict_after: &'static str,
    /// The setting that chooses a fabric: `fabric`. Its value follows.
    pub fabric: &'static str,
    /// The setting that names an RDMA device: `device`.
    pub device: &'static str,
    /// The setting that shares no memory with processes of this host: `share_memory(false)`.
    pub no_shm: &'static str,
    /// The setting that encrypts data: `encrypt`.
    pub encrypt: &'static str,
    /// What admits only known peers: `security keeps others out`.
    pub security: &'static str,
    /// The program that examines the host; `None` if there is none.
    pub doctor: Option<&'static str>,
}

impl Default for Wording {
    fn default() -> Self {
        Self {
            sender: "the sender",
            receiver: "the receiver",
            not_listening: "does the receiver run there?",
            default_address: None,
            directory: "the directory",
            choose_directory: "let this user write there, or choose another one",
            no_overwrite: "nothing is replaced",
            pool_bytes_max: "pool_bytes_max",
            wait: "wait(true)",
            evict_after: "evict_after of the sender",
            fabric: "fabric",
            device: "device",
            no_shm: "share_memory(false)",
            encrypt: "encrypt",
            security: "security keeps others out",
            doctor: None,
        }
    }
}

impl Wording {
    /// Refers to the program that examines the host, after `separator`.
    pub(crate) fn see_doctor(&self, separator: &str) -> String {
        self.doctor.map_or_else(String::new, |doctor| format!("{separator}see {doctor}"))
    }
}
