//! What can be asked on the command line.

mod parsing;
mod texts;

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

pub(crate) use self::parsing::{asks_for_json, asks_to_acquire, failure_of};
use self::texts::{ACQUIRE_EXAMPLES, CODES, DOCTOR_LONG, RUN_EXAMPLES, RUN_LONG};
use crate::duration;
use crate::job::end::Closing;

/// Run jobs under a lock, on one host or a fleet.
#[derive(Debug, Parser)]
#[command(name = "clinch", version, after_help = CODES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) store: Store,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

pub(crate) const DEFAULT_URL: &str = "file://";

/// Where the locks are.
#[derive(Args, Clone, Debug)]
pub(crate) struct Store {
    /// The store of the locks: file:// (one user's jobs on this host, no server needed), file:///DIR, file:///DIR?share=group (for
    /// several users), redis://HOST, rediss://HOST, redis+unix:///SOCKET, redis+sentinel://HOST,HOST,HOST/MASTER, redis+cluster://HOST,HOST,
    /// redlock://HOST,HOST,HOST, etcd://HOST,HOST,HOST, etcds://HOST. Everybody on this host sees what stands here: put a URL with
    /// a password into CLINCH_URL
    #[arg(
        short,
        long,
        global = true,
        env = "CLINCH_URL",
        hide_env_values = true,
        hide_default_value = true,
        default_value = DEFAULT_URL,
        value_name = "URL"
    )]
    pub(crate) url: String,
}

/// The command line of `clinch run`, understood in the same way in less time: describing all other verbs takes as long as
/// taking the lock.
#[derive(Debug, Parser)]
#[command(name = "clinch", version)]
pub(crate) struct RunCli {
    #[command(flatten)]
    pub(crate) store: Store,
    #[command(subcommand)]
    pub(crate) verb: RunVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RunVerb {
    Run(Box<Run>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Run(Box<Run>),
    Ls(Ls),
    Top(Top),
    Show(Show),
    Acquire(Acquire),
    Renew(Renew),
    Release(Release),
    Break(Break),
    Doctor(Doctor),
    Completions(Completions),
    Man(Man),
    Schema(Schema),
    #[command(hide = true)]
    Complete(Complete),
    #[command(hide = true)]
    Hold(Hold),
    #[command(hide = true)]
    EndJob(EndJob),
}

/// Run a command while holding a lock
///
/// Waits for the lock NAME, runs COMMAND, and releases the lock when the command has ended. Nobody overtakes in the queue.
/// If the lock is lost, the command is stopped before anybody else can be given it.
#[derive(Args, Debug)]
#[command(override_usage = "clinch run [OPTIONS] NAME [--] COMMAND...", after_help = RUN_EXAMPLES, after_long_help = RUN_LONG)]
pub(crate) struct Run {
    /// The lock
    pub(crate) name: String,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, required_unless_present = "shell_command", value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
    /// Run this line by $SHELL instead of a command, as flock does, so that SHELL= in a crontab counts; by /bin/sh where that is empty
    #[arg(short = 'c', long = "command", conflicts_with = "command", value_name = "SHELL-COMMAND")]
    pub(crate) shell_command: Option<OsString>,
    /// Become the command, with no clinch beside it: on file:// only, where the kernel keeps the lock until the last copy of its
    /// descriptor is closed, which ssh and sudo do at once. Nobody is told of a lost lock, and a run of the same lock inside is refused, as -F is inside one
    #[arg(short = 'F', long, conflicts_with_all = ["max_hold", "grace", "on_lost", "min_hold", "once_per", "retry_failed", "orphans", "events"])]
    pub(crate) no_fork: bool,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) share: Share,
    #[command(flatten)]
    pub(crate) lease: LeaseArgs,
    /// Lose the lock, and stop the command, when it was held this long. On file:// only while this `clinch run` lives and is not stopped
    #[arg(long, value_parser = duration::parse, value_name = "DUR")]
    pub(crate) max_hold: Option<Duration>,
    /// How long before the lease ends the command is told to stop [default: a sixth of the lease, at most 5s]
    #[arg(long, value_parser = duration::parse, value_name = "DUR")]
    pub(crate) grace: Option<Duration>,
    /// What to do to the command when the lock is about to be lost
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub(crate) on_lost: OnLost,
    /// Exit with N instead of 75 when the lock was not acquired
    #[arg(short = 'E', long, default_value_t = crate::exit::CONFLICT, hide_default_value = true, value_name = "N")]
    pub(crate) conflict_exit_code: u8,
    /// Do nothing, in silence and with success, when another has the lock or it is kept closed (--once-per, --min-hold), as cron likes
    /// it: -E 0, -n unless -w is given, and no word of that. On redlock:// give it -w 5s: jobs that try at the same moment may all be refused, with 69
    #[arg(long, conflicts_with_all = ["verbose", "conflict_exit_code"])]
    pub(crate) skip: bool,
    /// Keep the lock closed until this long after it was acquired, also when the command ends sooner, or clinch is killed
    #[arg(long, value_parser = duration::parse_closed, value_name = "DUR")]
    pub(crate) min_hold: Option<Duration>,
    /// Do not run again within this time after a run began, however that run ended
    #[arg(long, value_parser = duration::parse_closed, value_name = "DUR")]
    pub(crate) once_per: Option<Duration>,
    /// A run that failed does not count for --once-per; not with --shared or --permits, where another may have begun meanwhile
    #[arg(long, requires = "once_per", conflicts_with_all = ["shared", "permits"])]
    pub(crate) retry_failed: bool,
    /// What to do about processes that the command leaves behind. Where a job around this run holds the lock, that one's counts, and wait is refused
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub(crate) orphans: Orphans,
    /// Write what happens as JSON lines to a file, or to an open descriptor with fd:N
    #[arg(long, value_name = "FILE|fd:N")]
    pub(crate) events: Option<OsString>,
    /// Say on stderr what happens to the lock
    #[arg(short, long, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    /// Say nothing on stderr when the lock was not acquired or was lost
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// How long to wait.
#[derive(Args, Clone, Debug)]
pub(crate) struct Patience {
    /// Do not wait when the lock is taken, and for a store that does not answer 5s at most
    #[arg(short = 'n', long, visible_alias = "nonblock", conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// Wait at most this long, also for a store that is out of reach [default: for ever, once it was reached]
    #[arg(short, long, visible_alias = "timeout", value_parser = duration::parse, value_name = "DUR")]
    pub(crate) wait: Option<Duration>,
}

impl Patience {
    /// The longest wait; `None`: for as long as it takes.
    pub(crate) fn limit(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }
}

/// How much of the lock to take.
#[derive(Args, Clone, Debug)]
pub(crate) struct Share {
    /// Share the lock with others that share it
    #[arg(short, long, overrides_with = "exclusive", conflicts_with = "permits")]
    pub(crate) shared: bool,
    /// Take the lock alone (the default)
    #[arg(short = 'x', short_alias = 'e', long, overrides_with = "shared", conflicts_with = "permits")]
    pub(crate) exclusive: bool,
    /// Take N permits of a lock that has CAP of them
    #[arg(long, requires = "of", value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub(crate) permits: Option<u32>,
    /// How many permits there are; everybody must say the same
    #[arg(long, requires = "permits", value_parser = clap::value_parser!(u32).range(1..), value_name = "CAP")]
    pub(crate) of: Option<u32>,
}

/// What the lease is like.
#[derive(Args, Clone, Debug)]
pub(crate) struct LeaseArgs {
    /// How long the store keeps the lock for a holder that is cut off [default: the URL's ttl=, else 30s]
    #[arg(long, value_parser = duration::parse, value_name = "DUR")]
    pub(crate) ttl: Option<Duration>,
    /// What `clinch ls` shows as the purpose [default: the program that `run` runs, else none]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// TERM, and KILL before the lease ends
    #[default]
    Term,
    /// KILL at once
    Kill,
    /// Only report it
    Ignore,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Orphans {
    /// Release the lock when the command itself has ended
    #[default]
    Leave,
    /// Hold the lock until they have ended too
    Wait,
}

/// List locks that are held, waited for or kept closed
#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Only names that begin with this, or, with * ? or [..] in it, match it; * is any text, also with / in it
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) names: String,
    /// Only claims that hold their lock
    #[arg(long)]
    pub(crate) held: bool,
    /// Only claims that wait for their lock
    #[arg(long)]
    pub(crate) waiting: bool,
    /// Cut nothing away, however narrow the terminal is
    #[arg(long, conflicts_with = "json")]
    pub(crate) wide: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Look every SECONDS, as in --watch=5, until interrupted [default: 2s]. A terminal shows the table in place; else, and with --json, a
    /// table, or a line of JSON, is printed for each change of who holds, who waits or what is kept closed
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s",
        hide_default_value = true,
        value_parser = duration::parse_pause,
        conflicts_with = "wide",
        value_name = "SECONDS"
    )]
    pub(crate) watch: Option<Duration>,
}

/// Watch the locks on a full screen; take one away
///
/// Shows every second who holds each lock, for how long, how many wait, and how often it changed hands in the last minute, as far as
/// was seen; below, the claims of the chosen lock. The keys: up, down, PgUp, PgDn, Home, End (or k, j) choose, / shows only
/// names that contain a text, b takes the chosen lock away from its holder after a question, ? tells the keys, q leaves.
#[derive(Args, Debug)]
pub(crate) struct Top;

/// Show one lock, and until when it is kept closed; exits with 1 when nobody holds it
#[derive(Args, Debug)]
pub(crate) struct Show {
    /// The lock
    pub(crate) name: String,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Take a lock that outlives this command, for a shell script
///
/// Prints `name=... claim=... token=... for_pid=...`, quoted for the shell. The lock stays taken until `clinch release`, until its
/// TTL has run out without `clinch renew`, or, on file://, until the process has ended that --for names. There it has to be named, else nothing
/// is taken (64): who will work under the lock cannot be seen. `--for $$` is the shell, also within `$( )` and `( )`. A part of bash that works by
/// itself, as `( ... ) &`, says `me=$BASHPID` first, and then `--for $me`, since $BASHPID is another one within `$( )`; in fish it is `--for $fish_pid`, with --json. The lock is kept
/// by a process, `clinch hold`, that is deaf to all signals but KILL; `clinch release` ends it, or `clinch break`. On other stores the lock is bound to no process, and for_pid is
/// empty; --for is taken all the same, and names whom others see as the holder. If that line cannot be written, the lock is released at once, and the exit
/// code is 74; if this command was stopped until its lease was nearly over, it is 79. Check the exit code before the line is used, as in the example:
/// who was killed prints nothing, and an `eval` of nothing goes on. What fails otherwise prints `(exit N)`, so that an `eval`
/// fails too.
#[derive(Args, Debug)]
#[command(after_help = ACQUIRE_EXAMPLES)]
pub(crate) struct Acquire {
    /// The lock
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) share: Share,
    #[command(flatten)]
    pub(crate) lease: LeaseArgs,
    /// The process whose end frees the lock, needed on file://; elsewhere the one that is shown as the holder [default there: the one that called]
    #[arg(long = "for", alias = "for-pid", value_parser = clap::value_parser!(i32).range(1..), value_name = "PID")]
    pub(crate) for_pid: Option<i32>,
    /// Exit with N, not 0, instead of 75 when the lock was not acquired
    #[arg(short = 'E', long, default_value_t = crate::exit::CONFLICT, hide_default_value = true, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) conflict_exit_code: u8,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Renew a lock that `clinch acquire` took
#[derive(Args, Debug)]
pub(crate) struct Renew {
    /// The lock
    pub(crate) name: String,
    /// The claim that `clinch acquire` printed
    pub(crate) claim: String,
    /// Keep it this long from now, or longer where it was promised more [default: the URL's ttl=, else 30s]
    #[arg(long, value_parser = duration::parse, value_name = "DUR")]
    pub(crate) ttl: Option<Duration>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Release a lock that `clinch acquire` took; exits with 79 when it was lost before
///
/// This is the holder's own word that it is done: the lock is free at once, and nobody is told. What a process holds on file:// is
/// not released by another. In other stores that cannot be seen: end a job that still runs first, or use `clinch break`,
/// which gives it time to stop.
#[derive(Args, Debug)]
pub(crate) struct Release {
    /// The lock
    pub(crate) name: String,
    /// The claim that `clinch acquire` printed
    pub(crate) claim: String,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Take a lock away from its holder, or open one that is kept closed
///
/// The holder is told, and its job is stopped, where it can be reached. A shell that holds it by `clinch acquire` cannot be told: it
/// has 15 s, unless its lease ends or it releases the lock before; `clinch renew` answers 79 meanwhile. The next holder's token is larger, so stores that
/// check tokens refuse what the old holder still writes. What was done is told when all of it is done. Exits with 1 when there is
/// nothing to take away, or the answer is no, and with 75 when somebody still has the lock.
#[derive(Args, Debug)]
pub(crate) struct Break {
    /// The lock
    pub(crate) name: String,
    /// Only this claim, held or waiting; who waits and lives asks again, as the last [default: all that are held, and what keeps the lock closed, also to --once-per]
    #[arg(long)]
    pub(crate) claim: Option<String>,
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Print a JSON object, with what became of each claim
    #[arg(long)]
    pub(crate) json: bool,
}

/// Look whether a store is fit for locks, and say what to do where it is not
///
/// Prints one line for each thing that was looked at, with pass, warn or fail: what the URL means and who asks; the way to each server;
/// what it is like, or whose the directory is; what our user may not do; how long answers take; what the store promises; and a lock that is
/// really acquired, renewed and released. Exits with 0 when all pass, with 1 when something could be better, with 2 when something fails.
#[derive(Args, Debug)]
#[command(after_long_help = DOCTOR_LONG)]
pub(crate) struct Doctor {
    /// The store, where it is not that of -u or CLINCH_URL. A URL with a password belongs into CLINCH_URL
    #[arg(value_name = "URL")]
    pub(crate) target: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print a shell's completion script
#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: Shell,
}

/// Print the manual page, of all or of one verb
#[derive(Args, Debug)]
pub(crate) struct Man {
    /// The verb
    pub(crate) verb: Option<String>,
}

/// Print the JSON Schema of what clinch writes as JSON
///
/// All of it has the field "v", which is 1. Fields and words may be added to it; what is renamed, removed or given another meaning makes
/// another number. With --json, what fails is told on stderr, one JSON object on a line (`error`); what is said before, too (`message`).
#[derive(Args, Debug)]
pub(crate) struct Schema {
    /// Of the lines of `run --events`, of the --json of a verb, or of what a verb with --json says on stderr
    pub(crate) format: Format,
}

/// What is written as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Events,
    Ls,
    Show,
    Acquire,
    Renew,
    Release,
    Break,
    Doctor,
    Error,
    Message,
}

/// Tell a completion script what may stand here.
#[derive(Args, Debug)]
pub(crate) struct Complete {
    /// The words are as they were typed, and told as bash is to put them in, which parts words at these signs too.
    #[arg(long, value_name = "SIGNS")]
    pub(crate) bash: Option<String>,
    /// The command line up to the cursor.
    #[arg(last = true)]
    pub(crate) words: Vec<OsString>,
}

/// Hold a lock for `clinch acquire`.
#[derive(Args, Debug)]
pub(crate) struct Hold {
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) share: Share,
    #[command(flatten)]
    pub(crate) lease: LeaseArgs,
    /// Whose end frees the lock.
    #[arg(long)]
    pub(crate) for_pid: i32,
    /// Who waits for the report.
    #[arg(long)]
    pub(crate) asker: i32,
}

/// End a job whose `clinch run` was killed.
#[derive(Args, Debug)]
pub(crate) struct EndJob {
    /// The claim that it ran under.
    pub(crate) claim: String,
    /// The job, if it is known.
    pub(crate) pid: Option<i32>,
    /// With all that it has left behind.
    #[arg(long, overrides_with = "all")]
    pub(crate) all: bool,
    /// It has been ended.
    #[arg(long)]
    pub(crate) ended: bool,
    /// Keep this lock of it, which is held by an open descriptor, until it ends by itself,
    #[arg(long, value_name = "NAME")]
    pub(crate) keep: Option<String>,
    /// or the lock is taken away: then it has so many milliseconds to end.
    #[arg(long, value_name = "MS", requires = "keep")]
    pub(crate) grace: Option<u64>,
    /// Then keep this lock closed, which it ran under,
    #[arg(long, requires = "of")]
    pub(crate) close: Option<Closing>,
    /// and that of its turn, if it has begun:
    #[arg(long, requires = "of")]
    pub(crate) count: Option<Closing>,
    /// it has.
    #[arg(long)]
    pub(crate) began: bool,
    /// This process held them,
    #[arg(long)]
    pub(crate) of: Option<u32>,
    /// for so many milliseconds after their last renewal at most,
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(crate) ttl: u64,
    /// and that of the turn by this descriptor, if it did by one.
    #[arg(long, value_name = "FD")]
    pub(crate) turn: Option<i32>,
}
