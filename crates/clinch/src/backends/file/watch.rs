//! Waking the one waiter that an event concerns: inotify on the close of a file that was open for writing.
//!
//! The kernel closes a dead process's files, so the event comes on `kill -9` too. It comes a moment *before* the locks
//! of that description are gone, so a woken waiter that still finds its predecessor looks again soon.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::sync::Notify;

use crate::lane::Lane;
use crate::readable::Readable;
use crate::sync::lock;

/// Bytes read from inotify at a time: some two hundred events.
const READ: usize = 4096;

/// Set in an event when the kernel's queue of events overflowed: anything may have happened.
const OVERFLOW: i32 = -1;

/// All watches of one client, on one inotify instance that is made when first needed.
#[derive(Debug, Default)]
pub(super) struct Watcher(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    inotify: Option<OwnedFd>,
    watched: HashMap<i32, Vec<(u64, Arc<Notify>)>>,
    next_id: u64,
}

/// One watch on one file. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Watch {
    watcher: Arc<Mutex<State>>,
    descriptor: i32,
    id: u64,
    closed: Arc<Notify>,
}

impl Watcher {
    /// Watches for somebody closing this file. Fails where the kernel has no watch left (`fs.inotify.max_user_instances`
    /// is 128 on many systems); the caller then looks from time to time.
    pub(super) fn watch(&self, path: &Path, lane: &Lane) -> io::Result<Watch> {
        self.start(lane)?;
        let mut state = lock(&self.0);
        let nobody_reads = || io::Error::other("nothing runs on the background lane any more");
        let inotify = state.inotify.as_ref().ok_or_else(nobody_reads)?;
        let descriptor =
            inotify::add_watch(inotify, path, WatchFlags::CLOSE_WRITE | WatchFlags::DONT_FOLLOW)?;
        state.next_id += 1;
        let (id, closed) = (state.next_id, Arc::new(Notify::new()));
        state.watched.entry(descriptor).or_default().push((id, closed.clone()));
        Ok(Watch { watcher: self.0.clone(), descriptor, id, closed })
    }

    /// Has somebody read the events, unless somebody does.
    fn start(&self, lane: &Lane) -> io::Result<()> {
        let reading = {
            let mut state = lock(&self.0);
            if state.inotify.is_some() {
                return Ok(());
            }
            let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
            let reading = inotify.as_fd().try_clone_to_owned()?;
            state.inotify = Some(inotify);
            reading
        };
        // Unlocked: a lane that has ended drops the reader at once, which then says so in `state`.
        lane.spawn(Reader(self.0.clone()).read(reading)).map_err(io::Error::other)
    }
}

impl Watch {
    /// Completes when the file was closed since the watch began.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = lock(&self.watcher);
        let Some(watchers) = state.watched.get_mut(&self.descriptor) else { return };
        watchers.retain(|(id, _)| *id != self.id);
        if watchers.is_empty() {
            state.watched.remove(&self.descriptor);
            if let Some(inotify) = &state.inotify {
                // Fails when the file is gone, and with it the watch.
                let _ = inotify::remove_watch(inotify, self.descriptor);
            }
        }
    }
}

/// Reads events and wakes whom they concern, for as long as the lane lives.
struct Reader(Arc<Mutex<State>>);

impl Reader {
    async fn read(self, inotify: OwnedFd) {
        let Ok(inotify) = Readable::new(inotify) else { return };
        let mut bytes = [0; READ];
        while let Ok(len) = inotify.read(&mut bytes).await {
            let state = lock(&self.0);
            for descriptor in events(bytes.get(..len).unwrap_or_default()) {
                let tell = |(_, closed): &(u64, Arc<Notify>)| closed.notify_one();
                match descriptor {
                    OVERFLOW => state.watched.values().flatten().for_each(tell),
                    one => state.watched.get(&one).into_iter().flatten().for_each(tell),
                }
            }
        }
    }
}

/// However it ends: all are woken, and the next to watch starts anew.
impl Drop for Reader {
    fn drop(&mut self) {
        let watched = {
            let mut state = lock(&self.0);
            state.inotify = None;
            std::mem::take(&mut state.watched)
        };
        watched.values().flatten().for_each(|(_, closed)| closed.notify_one());
    }
}

/// The watch descriptors of a run of `struct inotify_event`.
fn events(mut bytes: &[u8]) -> impl Iterator<Item = i32> {
    std::iter::from_fn(move || {
        let (header, rest) = bytes.split_first_chunk::<16>()?;
        let [w0, w1, w2, w3, .., l0, l1, l2, l3] = *header;
        let name = u32::from_ne_bytes([l0, l1, l2, l3]);
        bytes = rest.get(usize::try_from(name).ok()?..)?;
        Some(i32::from_ne_bytes([w0, w1, w2, w3]))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn events_are_cut_apart_and_garbage_ends_them() {
        let event = |descriptor: i32, name: &[u8]| {
            let len = name.len() as u32;
            [&descriptor.to_ne_bytes()[..], &[0; 8], &len.to_ne_bytes(), name].concat()
        };
        let bytes = [event(1, b""), event(-1, b"name\0\0\0\0"), event(3, b"")].concat();
        assert_eq!(events(&bytes).collect::<Vec<_>>(), [1, -1, 3]);
        assert_eq!(events(&event(1, b"")[..15]).count(), 0);
        assert_eq!(events(&[0xff; 16]).count(), 0);
    }

    #[tokio::test]
    async fn each_file_wakes_its_own_watcher() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("1"), dir.path().join("2"));
        let file = std::fs::File::create(&one).unwrap();
        drop(std::fs::File::create(&two).unwrap());
        let (watcher, lane) = (Watcher::default(), Lane::thread());
        let on_one = watcher.watch(&one, &lane).unwrap();
        let on_two = watcher.watch(&two, &lane).unwrap();
        drop(file);
        tokio::time::timeout(Duration::from_secs(30), on_one.closed()).await.unwrap();
        let quiet = tokio::time::timeout(Duration::from_millis(1), on_two.closed()).await;
        assert!(quiet.is_err(), "nobody closed the second file");
        drop(on_one);
        assert_eq!(lock(&watcher.0).watched.len(), 1);
    }

    /// Such a runtime drops what it is handed at once, while whoever hands it over still has something locked.
    #[test]
    fn a_lane_whose_runtime_has_ended_hangs_nobody_and_watches_on() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("1");
        let file = std::fs::File::create(&path).unwrap();
        let lane = runtime().block_on(async { Lane::here().unwrap() });
        let watcher = Watcher::default();
        let (report, watches) = std::sync::mpsc::channel();
        let watching = lane.clone();
        std::thread::spawn(move || {
            for _ in 0..2 {
                report.send(watcher.watch(&path, &watching).unwrap()).unwrap();
            }
        });
        let watches = [(); 2].map(|()| watches.recv_timeout(Duration::from_secs(30)).unwrap());
        drop(file);
        for watch in watches {
            let told = async { tokio::time::timeout(Duration::from_secs(30), watch.closed()).await };
            runtime().block_on(told).expect("somebody reads the events");
        }
        drop(lane);
    }
}
