//! Which process something belongs to.
//!
//! A forked child has what its parent had in memory, but none of its threads: nobody there renews, wakes or tells anything, and
//! a mutex that another thread held at that moment stays locked for ever. So whatever may be met in a child asks first.
//!
//! A lock and its release ask six times, so the answer has to cost less than `getpid(2)`: it stands in a page that the kernel empties in
//! every child (`MADV_WIPEONFORK`, Linux 4.14). Where there is no such page the system is asked.
//!
//! A fork cannot come in the middle of a poll that goes on in the child. So one look before each poll is enough for all that a future
//! touches, and whatever a caller or a runtime polls goes through one door, [`Process::only`].

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::error::{Error, ErrorKind, Result};

const FORKED: &str =
    "this client or its Env belongs to the process that this one was forked from; connect again";

/// The process that made something, by its generation: what a process meets was made by itself or by one that it descends from, and
/// of these each has a number of its own. Without the page, by its process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u64);

impl Process {
    pub(crate) fn this() -> Process {
        Process(generation().unwrap_or_else(|| std::process::id().into()))
    }

    /// Whether this is a forked child of it.
    pub(crate) fn is_left(self) -> bool {
        self != Process::this()
    }

    /// Refuses everything in a forked child.
    pub(crate) fn check(self) -> Result<()> {
        if self.is_left() { Err(Error::new(ErrorKind::Closed, FORKED)) } else { Ok(()) }
    }

    /// Runs a future on the current runtime, in this process only: a forked child may go on with its copy of that.
    pub(crate) fn spawn(self, future: impl Future<Output = ()> + Send + 'static) {
        self.spawn_on(&Handle::current(), future);
    }

    /// As [`Process::spawn`], on another.
    pub(crate) fn spawn_on(self, runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
        drop(runtime.spawn(self.task(future)));
    }

    /// A future for a runtime. All are of one type, so that what a runtime does with a task is compiled once.
    pub(crate) fn task(
        self,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> Only<dyn Future<Output = ()> + Send> {
        Only { process: self, future: ManuallyDrop::new(Box::pin(future)) }
    }

    /// A future that goes on in this process only: a forked child is refused.
    pub(crate) fn only<F: Future>(self, future: F) -> Only<F> {
        Only { process: self, future: ManuallyDrop::new(Box::pin(future)) }
    }
}

/// See [`Process::only`]. In a forked child it is neither polled, since its files and connections are the parent's too, nor dropped,
/// since what it would leave may be locked for ever. Its memory stays as well: lists of those who wait lead there.
pub(crate) struct Only<F: ?Sized> {
    process: Process,
    future: ManuallyDrop<Pin<Box<F>>>,
}

impl<F: Future + ?Sized> Future for Only<F> {
    type Output = Result<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.process.check() {
            Ok(()) => self.future.as_mut().poll(context).map(Ok),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<F: ?Sized> Drop for Only<F> {
    fn drop(&mut self) {
        if !self.process.is_left() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.future) }
        }
    }
}

/// A static value that each process has for itself: a child finds none of its parent's, whose mutexes may be locked for ever.
#[cfg(feature = "memory")]
pub(crate) struct Own<T: 'static>(AtomicPtr<(Process, T)>);

#[cfg(feature = "memory")]
impl<T: Default + Send + Sync> Own<T> {
    pub(crate) const fn new() -> Own<T> {
        Own(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// What this process has; it stays for as long as that lives.
    pub(crate) fn get(&'static self) -> &'static T {
        let this = Process::this();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: either null or from `Box::leak`, of which nobody takes it back.
            if let Some((process, value)) = unsafe { known.as_ref() }
                && *process == this
            {
                return value;
            }
            // Two threads may have come at once; what the second made is left unused.
            let made = std::ptr::from_mut(Box::leak(Box::new((this, T::default()))));
            let _ = self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

/// The number of this process; `None` where the kernel does not tell of forks.
fn generation() -> Option<u64> {
    /// A child has a copy of it, and so goes on from the number of its parent.
    static LAST: AtomicU64 = AtomicU64::new(0);
    let page = page()?;
    match page.load(Ordering::Relaxed) {
        0 => {
            let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            let first = page.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
            Some(first.map_or_else(|earlier| earlier, |_| next))
        }
        known => Some(known),
    }
}

/// The word that is zero in each child until it is written there. Made without a lock, for a child could find that locked.
fn page() -> Option<&'static AtomicU64> {
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
    /// Stands for a page that could not be made: what was found out once holds for all children.
    static NONE: AtomicU64 = AtomicU64::new(0);
    let none = std::ptr::from_ref(&NONE).cast_mut();
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let made = map().unwrap_or(none);
        // Two threads may have come at once; the page of the second is left unused.
        let first = PAGE.compare_exchange(page, made, Ordering::AcqRel, Ordering::Acquire);
        page = first.map_or_else(|earlier| earlier, |_| made);
    }
    // SAFETY: it points to a mapping of at least one word, aligned to a page, that is never unmapped and only ever used as this
    // atomic.
    (!std::ptr::eq(page, none)).then(|| unsafe { &*page })
}

#[cfg(target_os = "linux")]
fn map() -> Option<*mut AtomicU64> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    let (length, access) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
    let emptied = |flags| {
        // SAFETY: a new mapping, at an address that the kernel picks; nothing else knows of it.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, flags) }.ok()?;
        // SAFETY: exactly the mapping made above.
        match unsafe { madvise(page, length, Advice::LinuxWipeOnFork) } {
            Ok(()) => Some(page),
            Err(_) => {
                // SAFETY: the same mapping, of which nobody has a pointer.
                let _ = unsafe { munmap(page, length) };
                None
            }
        }
    };
    // Every kernel refuses it for shared memory. An emulator that does not (old qemu-user) says yes to all, and empties nothing. The
    // page that proves it is left unused.
    match emptied(MapFlags::SHARED) {
        Some(_) => None,
        None => emptied(MapFlags::PRIVATE).map(<*mut _>::cast),
    }
}

#[cfg(not(target_os = "linux"))]
fn map() -> Option<*mut AtomicU64> {
    None
}
