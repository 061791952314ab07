//! A TCP proxy that injects the faults of a network.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::port::Port;
use relay::Relay;

mod link;
mod owner;
mod relay;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Requests,
    /// From the server to the client.
    Replies,
}

/// A proxy in front of a server. Its port stays the same for as long as it lives; dropping it closes everything.
///
/// A control has taken effect when its method returns. A *reset* is an RST packet to both sides, unless
/// said otherwise.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    orders: Sender<(Order, Sender<()>)>,
    bell: UnixStream,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

/// What the proxy is told to do.
#[derive(Debug)]
enum Order {
    CutAll,
    Refuse(bool),
    BlackHole(bool),
    HoldReplies(bool),
    HoldEnds(bool),
    HoldProcess(Option<u32>),
    Strand(bool),
    Delay(Duration),
    CutAfter(Direction, u64),
    Upstream(SocketAddr),
    /// Only says when it is this order's turn: whatever was forwarded before is counted by then.
    Nothing,
    Stop,
}

/// What the proxy has done.
#[derive(Debug, Default)]
struct Counts {
    forwarded: [AtomicU64; 2],
    open: AtomicUsize,
    accepted: AtomicUsize,
    cuts: AtomicUsize,
}

impl Proxy {
    /// Starts a proxy in front of `upstream`, which need not listen yet.
    pub fn start(upstream: SocketAddr) -> Proxy {
        let port = Port::free();
        let addr = port.addr();
        let listener = TcpListener::bind(addr).expect("the port is reserved");
        let (orders, inbox) = channel();
        let (bell, heard) = UnixStream::pair().expect("a pair of sockets");
        let counts = Arc::new(Counts::default());
        let relay = Relay::new(port, listener, upstream, inbox, heard, Arc::clone(&counts));
        let thread = std::thread::spawn(move || relay.run());
        Proxy { addr, orders, bell, counts, thread: Some(thread) }
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Resets all connections; what was held is lost. New ones are accepted.
    pub fn cut_all(&self) {
        self.give(Order::CutAll);
    }

    /// Refuses new connections, or accepts them again; those that stand go on.
    pub fn refuse(&self, on: bool) {
        self.give(Order::Refuse(on));
    }

    /// Delivers nothing in either direction, not even the end of a connection, while bytes and new connections are
    /// accepted. What was held is delivered when this is turned off.
    pub fn black_hole(&self, on: bool) {
        self.give(Order::BlackHole(on));
    }

    /// Holds all replies while requests pass; they are delivered when this is turned off.
    pub fn hold_replies(&self, on: bool) {
        self.give(Order::HoldReplies(on));
    }

    /// Delivers bytes but not the end of a connection, until this is turned off: what arrives late arrives at a server
    /// that does not know yet that nobody waits for the answer.
    pub fn hold_ends(&self, on: bool) {
        self.give(Order::HoldEnds(on));
    }

    /// Like [`black_hole`](Proxy::black_hole), for the connections alone that this process of our host makes.
    pub fn hold_process(&self, pid: Option<u32>) {
        self.give(Order::HoldProcess(pid));
    }

    /// Delivers nothing on the connections that stand now, while new ones go on as usual, so that what is on its way arrives after
    /// what its sender sends once more. What was held is delivered when this is turned off.
    pub fn strand(&self, on: bool) {
        self.give(Order::Strand(on));
    }

    /// Delays whatever arrives from now on, each way.
    pub fn delay(&self, each_way: Duration) {
        self.give(Order::Delay(each_way));
    }

    /// Resets the connection that forwards the `bytes`-th byte from now on in `direction`, right after that byte;
    /// with 0, the connection that is about to forward the next one. Counts over all connections, and cuts once.
    ///
    /// The server gets an orderly end instead of a reset, which could make it drop what it has not read yet: so it
    /// handles whatever was forwarded. A client gets what was forwarded before it gets the reset, unless its kernel
    /// had no room.
    pub fn cut_after(&self, direction: Direction, bytes: u64) {
        self.give(Order::CutAfter(direction, bytes));
    }

    /// Leads new connections to another server.
    pub fn set_upstream(&self, upstream: SocketAddr) {
        self.give(Order::Upstream(upstream));
    }

    /// How many bytes were forwarded in a direction since the start.
    pub fn forwarded(&self, direction: Direction) -> u64 {
        self.give(Order::Nothing);
        self.counts.forwarded[direction as usize].load(Ordering::Acquire)
    }

    /// How many connections stand.
    pub fn connections(&self) -> usize {
        self.give(Order::Nothing);
        self.counts.open.load(Ordering::Acquire)
    }

    /// How many connections were accepted since the start.
    pub fn accepted(&self) -> usize {
        self.give(Order::Nothing);
        self.counts.accepted.load(Ordering::Acquire)
    }

    /// How often [`cut_after`](Proxy::cut_after) has cut.
    pub fn cuts(&self) -> usize {
        self.give(Order::Nothing);
        self.counts.cuts.load(Ordering::Acquire)
    }

    fn give(&self, order: Order) {
        let (done, obeyed) = channel();
        self.orders.send((order, done)).expect("the proxy runs");
        // A full pipe is a bell that rings already.
        let _ = (&self.bell).write(&[0]);
        obeyed.recv().expect("the proxy runs");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let (done, _) = channel();
        let _ = self.orders.send((Order::Stop, done));
        let _ = (&self.bell).write(&[0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
