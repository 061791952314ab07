//! How much there may be of anything, and what it costs.

use super::*;

/// Every second byte from the ticket in the argument on, so that each counts for a claim.
const FILL: &str = "import fcntl,os,struct,sys
path,first,count=sys.argv[1].rsplit(':',2)
fd=os.open(path,os.O_RDWR)
for claim in range(int(count)):
    fcntl.fcntl(fd,37,struct.pack('hhqqi4x',fcntl.F_WRLCK,0,int(first)+2*claim,1,0))
print('ready',flush=True)
sys.stdin.read()";

#[tokio::test]
async fn a_full_queue_refuses_and_loses_nothing() {
    const RECORDS: u64 = 8192;
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let readers = locks.rwlock("job").unwrap();
    let reader = readers.read().timeout(PATIENCE).await.unwrap();
    let (file, first) = (the_lock_file(dir.path()), reader.token().get() + 2);
    let fill = |count| Python::start(FILL, Path::new(&format!("{}:{first}:{count}", file.display())));
    let others = fill(RECORDS - 1);
    let last = first + 2 * RECORDS;
    rewrite_header(&file, "last", &format!("{last:016}"));
    rewrite_header(&file, "reserved", &format!("{:016}", last + 1));
    let error = readers.read().timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    assert!(error.to_string().contains("8192 claims"), "{error}");
    reader.verify().await.unwrap();
    drop(others);
    // No more come from us, and who looks is not kept for as long as somebody likes.
    let others = fill(RECORDS);
    assert_eq!(locks.state("job").await.unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(locks.list("").await.unwrap_err().kind(), ErrorKind::Refused);
    let survey = locks.survey("").await.unwrap();
    assert!(survey.locks.is_empty() && survey.unread.unwrap().to_string().contains("1 lock file may not"));
    drop(others);
    drop(readers.read().timeout(PATIENCE).await.unwrap());
}

/// After 8192 tickets the places come round again; the record of who is still there would be another's.
#[tokio::test]
async fn a_newcomer_passes_over_the_place_of_who_is_still_there() {
    const RECORDS: u64 = 8192;
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let (file, both) = (the_lock_file(dir.path()), locks.rwlock("job").unwrap());
    // The first, who was alone, has no place of that kind.
    let first = both.read().timeout(PATIENCE).await.unwrap();
    let patient = both.read().timeout(PATIENCE).await.unwrap();
    let place = patient.token().get();
    let come_round = |times| {
        let last = place + times * RECORDS - 1;
        rewrite_header(&file, "last", &format!("{last:016}"));
        rewrite_header(&file, "reserved", &format!("{:016}", last + 1));
    };
    let is_there = async |others: usize| {
        let state = locks.state("job").await.unwrap().unwrap();
        let ids: Vec<_> = state.claims.iter().map(|claim| claim.id).collect();
        assert!(
            ids.len() == 2 + others && ids[1] == patient.claim_id(),
            "the patient one is there: {state:?}"
        );
    };
    come_round(1);
    let reader = both.read().timeout(PATIENCE).await.unwrap();
    is_there(1).await;
    assert_eq!(reader.token().get(), place + RECORDS + 1);
    drop(reader);
    // One that wants all need not know of all.
    come_round(2);
    let writer = tokio::spawn(async move { both.write().timeout(PATIENCE).await });
    claims(&locks, "job", 3).await;
    is_there(1).await;
    patient.verify().await.unwrap();
    drop((first, patient));
    assert_eq!(writer.await.unwrap().unwrap().token().get(), place + 2 * RECORDS + 1);
}

/// A lock that more wait for than had room in its file refused the rest.
#[tokio::test]
async fn more_than_a_thousand_wait_in_their_order() {
    const WAITERS: usize = 1100;
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let held = lock(&locks, "job").await;
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        let (locks, order) = (locks.clone(), order.clone());
        waiters.push(tokio::spawn(async move {
            let guard = locks.mutex("job").unwrap().lock().await.unwrap();
            order.lock().unwrap().push(number);
            guard.release().await.unwrap();
        }));
        // Runs it until it waits: its first step is made without a pause.
        tokio::task::yield_now().await;
    }
    claims(&locks, "job", WAITERS + 1).await;
    held.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..WAITERS).collect::<Vec<_>>());
}

/// None of them stands in the way of the one behind it by its mode, so who looks has to read about all that are ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_wait_for_permits_and_all_get_them() {
    const WAITERS: usize = 800;
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let permits = locks.semaphore("job", 4).unwrap();
    let held = permits.acquire(4).unwrap().await.unwrap();
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..WAITERS {
        let permits = permits.clone();
        waiters.spawn(async move {
            let permit = permits.acquire(1).unwrap().await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
            permit.release().await.unwrap();
        });
    }
    claims(&locks, "job", WAITERS + 1).await;
    held.release().await.unwrap();
    let all = tokio::time::timeout(4 * PATIENCE, waiters.join_all()).await;
    assert_eq!(all.expect("they get nowhere").len(), WAITERS);
}

/// Each of a crowd leaves its record; a lock that many have waited for must not keep room for all of them.
#[tokio::test]
async fn a_file_does_not_grow_with_those_who_have_passed() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let permits = connect(dir.path()).await.semaphore("job", 2).unwrap();
    let mut held = permits.acquire(1).unwrap().await.unwrap();
    for _ in 0..5000 {
        // Never alone, so each has a place of its own.
        let next = permits.acquire(1).unwrap().await.unwrap();
        drop(std::mem::replace(&mut held, next));
    }
    let bytes = || std::fs::metadata(the_lock_file(dir.path())).unwrap().blocks() * 512;
    assert!(bytes() <= 256 << 10, "{} bytes for what 5 MiB have passed through", bytes());
    held.release().await.unwrap();
    assert!(bytes() <= 8 << 10, "{} bytes for nobody", bytes());
    // One that was killed has given nothing back: the next does.
    let file = std::fs::File::options().write(true).open(the_lock_file(dir.path())).unwrap();
    rewrite_header(
        &the_lock_file(dir.path()),
        "last",
        &format!("{:016}", header_field(&the_lock_file(dir.path()), "last") + 1),
    );
    std::os::unix::fs::FileExt::write_all_at(&file, &[b' '; 1 << 20], 4096).unwrap();
    drop(permits.acquire(2).unwrap().await.unwrap());
    assert!(bytes() <= 8 << 10, "{} bytes for the dead", bytes());
}

#[tokio::test]
async fn a_long_lived_permit_keeps_its_record_while_thousands_pass() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await.label("the patient one").unwrap();
    let patient = locks.semaphore("job", 2).unwrap().acquire(1).unwrap().await.unwrap();
    let hasty = connect(dir.path()).await.semaphore("job", 2).unwrap();
    for _ in 0..2500 {
        drop(hasty.try_acquire(1).await.unwrap().unwrap());
    }
    let state = locks.state("job").await.unwrap().unwrap();
    assert_eq!(state.claims.len(), 1);
    assert_eq!(
        (state.claims[0].id, state.claims[0].owner.label.as_str()),
        (patient.claim_id(), "the patient one")
    );
}

/// Set for [`pairs`] to what it shall do.
const PAIRS: &str = "CLINCH_TEST_PAIRS";

/// Locks and releases as often as it is told; nothing by itself.
#[test]
fn pairs() {
    let Some(count) = std::env::var(PAIRS).ok().and_then(|count| count.parse().ok()) else { return };
    let dir = tempfile::tempdir().unwrap();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let mutex = connect(dir.path()).await.mutex("job").unwrap();
        for _ in 0..count {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
    });
}

/// How often the calls of a pair were made in a process that took this many pairs.
fn calls(pairs: u32) -> std::collections::BTreeMap<String, u32> {
    let counts = tempfile::NamedTempFile::new().unwrap();
    let traced =
        "trace=openat,fcntl,pread64,pwrite64,close,fstat,newfstatat,fsync,fdatasync,flock,read,write,getpid";
    let status = Command::new("strace")
        .args(["-f", "-c", "-e", traced, "-o"])
        .arg(counts.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "limits::pairs"])
        .env(PAIRS, pairs.to_string())
        .stdout(Stdio::null())
        .status()
        .expect("this test needs strace");
    assert!(status.success());
    let text = std::fs::read_to_string(counts.path()).unwrap();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|row| row.len() >= 5 && row[0].parse::<f32>().is_ok() && !row.contains(&"total"));
    rows.map(|row| (row.last().unwrap().to_string(), row[3].parse().unwrap())).collect()
}

#[test]
fn an_uncontended_pair_costs_seven_system_calls() {
    let (few, many) = (calls(100), calls(600));
    // Starting up takes a call more or less from one process to the next.
    let of = |call: &str| many.get(call).unwrap_or(&0).saturating_sub(*few.get(call).unwrap_or(&0));
    // The standard library's debug build asks of every descriptor that it closes whether it is open.
    let fcntl = if cfg!(debug_assertions) { 4 } else { 3 };
    let per_pair = ["openat", "fcntl", "pread64", "pwrite64", "close", "getpid"]
        .map(|call| (call, (of(call) + 250) / 500));
    // Forks are looked for often, and cost no call.
    let expected =
        [("openat", 1), ("fcntl", fcntl), ("pread64", 1), ("pwrite64", 1), ("close", 1), ("getpid", 0)];
    assert_eq!(per_pair, expected);
    // By read and write the threads wake each other: how often, the load of the machine says.
    let of_files = many.keys().filter(|call| !["read", "write"].contains(&call.as_str()));
    let total: u32 = of_files.map(|call| of(call)).sum();
    assert!(total < (4 + fcntl) * 500 + 250, "{many:?}: no call but these, save one fsync in 1024 claims");
}

/// Set for [`small_files`] to the directory in which it shall try.
const SMALL_FILES: &str = "CLINCH_TEST_SMALL_FILES";

/// Asks for a lock that is held, with a limit on the size of files, which is the whole process's.
#[test]
fn small_files() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let Some(dir) = std::env::var_os(SMALL_FILES) else { return };
    setrlimit(Resource::Fsize, Rlimit { current: Some(4096), maximum: None }).unwrap();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let locks = connect(Path::new(&dir)).await;
        let error = locks.mutex("job").unwrap().lock().timeout(PATIENCE).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        assert!(
            error.to_string().contains("4096 bytes") && error.to_string().contains("ulimit -f"),
            "{error}"
        );
        let states = locks.list("").await.unwrap();
        assert_eq!(states.len(), 1, "who only looks needs no room");
        // Nor who rewrites what is there.
        let held = states[0].claims[0].id;
        assert_eq!(locks.evict("job", held).await.unwrap(), Freed::Removed);
    });
}

/// The write that goes beyond it kills the process.
#[tokio::test]
async fn a_limit_on_the_size_of_files_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let held = lock(&connect(dir.path()).await, "job").await;
    let mut test = Command::new(std::env::current_exe().unwrap());
    let output = test.args(["--exact", "limits::small_files"]).env(SMALL_FILES, dir.path()).output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stdout));
    assert!(held.verify().await.is_err(), "it was evicted");
}

/// Set for [`descriptors`] when it is to use up its own.
const DESCRIPTORS: &str = "CLINCH_TEST_DESCRIPTORS";

/// Holds locks until no descriptor is left; nothing by itself, since the limit is the whole process's.
#[test]
fn descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os(DESCRIPTORS).is_none() {
        return;
    }
    const SOFT: u64 = 40;
    const HARD: u64 = 90;
    setrlimit(Resource::Nofile, Rlimit { current: Some(SOFT), maximum: Some(HARD) }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let locks = connect(dir.path()).await;
        let mut guards = Vec::new();
        let error = loop {
            match locks.mutex(&guards.len().to_string()).unwrap().lock().await {
                Ok(guard) => guards.push(guard),
                Err(error) => break error,
            }
        };
        assert_eq!(getrlimit(Resource::Nofile).current, Some(HARD), "the soft limit was raised");
        assert!(guards.len() as u64 > SOFT, "and used: {}", guards.len());
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(error.to_string().contains("90") && error.to_string().contains("ulimit"), "{error}");
        assert!(guards.iter().all(Guard::is_held));
        drop(guards.pop());
        drop(lock(&locks, "again").await);
    });
}

#[test]
fn running_out_of_descriptors_is_said_clearly_and_loses_nothing() {
    let mut test = Command::new(std::env::current_exe().unwrap());
    let output = test.args(["--exact", "limits::descriptors"]).env(DESCRIPTORS, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
