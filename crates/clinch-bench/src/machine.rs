//! The machine: what it is, how busy it is, what this process has used of it, and where its threads run.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::Result;

/// Facts without which figures cannot be compared.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
    file_system: String,
    load_before: String,
}

impl Machine {
    /// The machine as it is now; `dir` is where the lock files will lie.
    pub(crate) fn look(dir: &Path) -> Machine {
        let cpu = read("/proc/cpuinfo");
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Machine {
            cpu: model.map_or("unknown", |(_, model)| model).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            file_system: file_system(dir),
            load_before: load(),
        }
    }

    pub(crate) fn markdown(&self) -> String {
        let Machine { cpu, cores, kernel, file_system, load_before } = self;
        format!("{cores} × {cpu}, Linux {kernel}, lock files on {file_system}, load before {load_before}")
    }

    pub(crate) fn json(&self) -> Value {
        let Machine { cpu, cores, kernel, file_system, load_before } = self;
        json!({
            "cpu": cpu, "cores": cores, "kernel": kernel, "file_system": file_system,
            "load_before": load_before, "load_after": load(),
        })
    }
}

/// Programs that ran or wanted to on average over 1, 5 and 15 minutes.
pub(crate) fn load() -> String {
    read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// The type of the file system that `dir` lies on.
pub(crate) fn file_system(dir: &Path) -> String {
    let mounts = read("/proc/self/mounts");
    let mounted = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    let above = mounted.filter(|(at, _)| dir.starts_with(at));
    above.max_by_key(|(at, _)| at.len()).map_or("unknown", |(_, kind)| kind).to_owned()
}

/// Nanoseconds on the monotonic clock: the same for all processes of the host.
pub(crate) fn now() -> u64 {
    read_clock(ClockId::Monotonic)
}

/// CPU time that this process has used, in nanoseconds.
pub(crate) fn cpu_time() -> u64 {
    read_clock(ClockId::ProcessCPUTime)
}

fn read_clock(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A time in the unit of [`now`].
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Sleeps until `at` on the clock of [`now`].
pub(crate) fn sleep_until(at: u64) {
    std::thread::sleep(Duration::from_nanos(at.saturating_sub(now())));
}

/// CPU time of this process's threads of one name, in seconds, to the scheduler's tick (usually 10 ms).
pub(crate) fn thread_cpu_time(name: &str) -> Result<f64> {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        // A thread may end meanwhile; what it used is then not this name's any more.
        let stat = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
        ticks += thread_ticks(&stat, name).unwrap_or(0);
    }
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// CPU time of another process, in seconds, to the scheduler's tick.
pub(crate) fn cpu_time_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, ticks) = named_ticks(&stat).ok_or("a process without its times")?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// User and system time in a line of `/proc/self/task/*/stat`, if the thread has this name.
fn thread_ticks(stat: &str, name: &str) -> Option<u64> {
    named_ticks(stat).filter(|(comm, _)| *comm == name).map(|(_, used)| used)
}

/// The name in a line of `stat`, and user and system time together.
fn named_ticks(stat: &str) -> Option<(&str, u64)> {
    // The name stands in parentheses and may itself contain anything.
    let (head, tail) = stat.rsplit_once(") ")?;
    let (_, comm) = head.split_once('(')?;
    let mut words = tail.split(' ').skip(11);
    let used = words.next()?.parse::<u64>().ok()? + words.next()?.parse::<u64>().ok()?;
    Some((comm, used))
}

/// Resident memory of this process, in bytes, without the pages of its program: how many of those were read says nothing of
/// what is kept.
pub(crate) fn resident() -> Result<u64> {
    // Exact, where the counters of /proc/self/statm may be some pages behind.
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")?.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no Anonymous in /proc/self/smaps_rollup")?.trim().parse::<u64>()? * 1024)
}

/// Raises the soft limit of open files to the hard one, and says what that is.
pub(crate) fn raise_descriptors() -> u64 {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Left as it is where that is not allowed; whoever runs out of descriptors says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    maximum.unwrap_or(u64::MAX)
}

/// The calling thread, and threads that it starts, on one CPU until this is dropped.
#[derive(Debug)]
pub(crate) struct Pinned(CpuSet);

impl Pinned {
    /// Pins to the last CPU that this process may use: the first ones serve most interrupts.
    pub(crate) fn to_one_cpu() -> Result<Pinned> {
        let before = sched_getaffinity(None)?;
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| before.is_set(*cpu)).ok_or("no CPU to run on")?;
        let mut one = CpuSet::new();
        one.set(last);
        sched_setaffinity(None, &one)?;
        Ok(Pinned(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A thread that stays on one CPU makes later figures worse, not wrong.
        let _ = sched_setaffinity(None, &self.0);
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_time_is_found_behind_a_name_with_spaces_and_parentheses() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 64 0 0 0 0 12 30 0 0 20 0 3 0 99 0 0";
        assert_eq!(thread_ticks(stat, "a) b (c"), Some(42));
        assert_eq!(thread_ticks(stat, "clinch"), None);
        assert_eq!(thread_ticks("", "clinch"), None);
    }

    #[test]
    fn the_machine_tells_about_itself() {
        let machine = Machine::look(Path::new("/proc"));
        assert_eq!(machine.file_system, "proc");
        assert!(machine.cores > 0 && !machine.kernel.is_empty());
        assert!(resident().unwrap() > 100 * 1024);
        assert!(cpu_time() > 0 && now() > 0);
    }

    #[test]
    fn pinning_ends_with_its_value() {
        let before = sched_getaffinity(None).unwrap().count();
        let pinned = Pinned::to_one_cpu().unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        drop(pinned);
        assert_eq!(sched_getaffinity(None).unwrap().count(), before);
    }
}
