//! What help and manual pages say at length. Lines that begin with two blanks are shown as they are: 73 columns at most, which is what a page of 80 has.

pub(super) const CODES: &str = "\
Durations are like 500ms, 5s, 1h; plain numbers are seconds.
What only asks the store gives up after 5s without an answer; what fails has 2s more to withdraw what it may have left there.
Exit codes: the command's own (128+N when signal N ended it); 75 not acquired (of break: not taken away); 79 lock lost; 69 store unreachable,
full, or not sure whether the lock is taken; 77 store refused access; 74 the answer could not be written; 70 this host failed; 64 wrong usage; 126 and 127 as a shell's.";

macro_rules! run_examples {
    () => {
        "\
Examples:
  clinch run nightly -- ./backup --all           one at a time, in turn
  clinch run -n nightly -- ./backup              if it runs, exit with 75
  clinch run --skip nightly -- ./backup          succeed if it runs: cron
  clinch run -w 30s nightly -c 'make && deploy'  wait 30 s at most
  clinch run --permits 1 --of 4 gpu -- ./train   four at a time
  clinch run --skip --once-per 50m x -- ./mail   hourly, on one host"
    };
}

pub(super) const RUN_EXAMPLES: &str = run_examples!();

pub(super) const RUN_LONG: &str = concat!(
    run_examples!(),
    "\n\n\
The command is in clinch's process group, so keys of the terminal reach it as they would without clinch, also in a pipe or a script. When it dies
of Ctrl-C, so does clinch, so that a script or a loop ends. INT, TERM, HUP, QUIT, USR1, USR2, WINCH, TSTP, TTIN, TTOU and CONT that are sent to clinch are
passed on to it and to what it has started in that group. Its environment has CLINCH_NAME, CLINCH_TOKEN (larger than that of every earlier
holder: give it to the store that you write to), CLINCH_CLAIM and CLINCH_HELD. A CLINCH_URL with a password is
withheld: where a clinch inside needs it, the job has to set it again.

A job that holds NAME may run `clinch run NAME` on the same store again: the inner one runs its command at once, if its environment has CLINCH_HELD, as by `sudo
--preserve-env=CLINCH_HELD,CLINCH_URL`; else, and as `clinch acquire`, it waits for the job around it, and says so on stderr. If the job ends
before an inner one does, the lock is kept until that has ended too; a signal to clinch then reaches it. --once-per, --min-hold, --max-hold, --orphans wait and
-F are for the outer one: the inner one is refused them (64).
What does not descend from this clinch, but was started by at, a batch system or a container daemon for the job, waits its turn.

If the lock is about to be lost, all of the command gets TERM, also what goes on when its first process has ended, and KILL before anybody else can be given
the lock; clinch then exits with 79. What outlives --grace goes on if the lock was renewed by then. Where /proc hides processes (hidepid), what is hidden below a hidden one is killed without TERM, and goes on if that one is another user's or
clinch is killed by KILL. If clinch itself is killed by KILL, a small process, job-watch, keeps the lock on file:// until the command has ended, and whatever
that has started keeps it too, unless it closed the descriptor that it inherited; when `clinch break` takes the lock away meanwhile, job-watch ends the
command, as clinch would have. On other stores job-watch then kills all of the job,
and daemons that it left behind while it still runs. It does so as well at the end of the lease if clinch is stopped then, as by Ctrl-Z.
A process that is stopped for longer than its lease cannot be saved by any of this: check tokens at the store.

--once-per counts every run that began, whatever its exit code, from the moment at which its command was started; so under cron it is
to be shorter than cron's period. With --retry-failed, a run whose command failed does not count, unless its lock was lost. It uses a second lock, NAME/once-per: `clinch
show NAME` tells until when that is closed, `clinch break NAME` opens it. Like --min-hold it needs a store that can keep a lock closed.
On etcd:// after an election, and on file:// after a reboot, both are counted by wall clocks.

Events (--events) are JSON lines: waiting, acquired, reentered, jeopardy, held, lost, stopping, exited, released, refused.
`clinch schema events` describes them."
);

pub(super) const ACQUIRE_EXAMPLES: &str = "\
Example:
  lock=$(clinch acquire nightly --ttl 10m --for $$) || exit; eval \"$lock\"
  ./one && clinch renew --ttl 10m -- \"$name\" \"$claim\" && ./two
  clinch release -- \"$name\" \"$claim\"";

pub(super) const DOCTOR_LONG: &str = "\
JSON (--json): v, the version of this form, 1; verdict, the worst one; checks, each with what (always the same word), at (the server, or
null), verdict (pass, warn or fail), seen, and remedy (null where it passes); round_trip, with calls, p50_us and p99_us; capabilities, what
the store promises, by the names that require= takes; lock, with name, acquire_us, renew_us and release_us. The last three are null where
it did not come to that.

The lock is clinch-doctor/USER@HOST, so that a directory is not filled with the locks of each look.";
