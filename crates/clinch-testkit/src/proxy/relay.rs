//! The thread of a proxy: it owns all sockets and alone decides what passes.

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::link::{Fate, Link, Rules};
use super::{Counts, Direction, Order, owner};
use crate::port::Port;

pub(super) struct Relay {
    port: Port,
    listener: Option<TcpListener>,
    upstream: SocketAddr,
    orders: Receiver<(Order, Sender<()>)>,
    bell: UnixStream,
    counts: Arc<Counts>,
    links: Vec<Link>,
    black_hole: bool,
    hold_replies: bool,
    hold_ends: bool,
    hold_process: Option<u32>,
    delay: Duration,
    budget: [Option<u64>; 2],
}

impl Relay {
    pub(super) fn new(
        port: Port,
        listener: TcpListener,
        upstream: SocketAddr,
        orders: Receiver<(Order, Sender<()>)>,
        bell: UnixStream,
        counts: Arc<Counts>,
    ) -> Relay {
        bell.set_nonblocking(true).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        Relay {
            port,
            listener: Some(listener),
            upstream,
            orders,
            bell,
            counts,
            links: Vec::new(),
            black_hole: false,
            hold_replies: false,
            hold_ends: false,
            hold_process: None,
            delay: Duration::ZERO,
            budget: [None; 2],
        }
    }

    pub(super) fn run(mut self) {
        loop {
            while let Ok((order, done)) = self.orders.try_recv() {
                if matches!(order, Order::Stop) {
                    return;
                }
                self.obey(order);
                let _ = done.send(());
            }
            self.forward();
            self.wait();
            let _ = self.bell.read(&mut [0; 64]);
            self.accept();
            let due = Instant::now() + self.delay;
            self.links.iter_mut().for_each(|link| link.read(due));
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::CutAll => {
                // Also those that have connected already and were not seen yet.
                self.accept();
                self.links.iter().for_each(Link::reset);
                self.links.clear();
                self.counts.open.store(0, Ordering::Release);
            }
            Order::Refuse(true) => {
                self.accept();
                self.listener = None;
            }
            Order::Refuse(false) if self.listener.is_none() => {
                let listener = TcpListener::bind(self.port.addr()).expect("the port is reserved");
                listener.set_nonblocking(true).expect("a socket");
                self.listener = Some(listener);
            }
            Order::BlackHole(on) => self.black_hole = on,
            Order::HoldReplies(on) => self.hold_replies = on,
            Order::HoldEnds(on) => self.hold_ends = on,
            Order::HoldProcess(pid) => {
                // Also those that have connected already and were not seen yet.
                self.accept();
                self.hold_process = pid;
                let here = self.port.addr();
                for link in &mut self.links {
                    link.held = pid.is_some_and(|pid| owner::has(pid, link.client(), here));
                }
            }
            Order::Strand(on) => {
                self.accept();
                self.links.iter_mut().for_each(|link| link.held = on);
            }
            Order::Delay(each_way) => self.delay = each_way,
            Order::CutAfter(direction, bytes) => self.budget[direction as usize] = Some(bytes),
            Order::Upstream(upstream) => self.upstream = upstream,
            Order::Refuse(false) | Order::Nothing | Order::Stop => {}
        }
    }

    fn held(&self) -> [bool; 2] {
        [self.black_hole, self.black_hole || self.hold_replies]
    }

    fn forward(&mut self) {
        let mut rules = Rules {
            now: Instant::now(),
            held: self.held(),
            hold_ends: self.hold_ends,
            budget: self.budget,
            forwarded: [0; 2],
        };
        self.links.retain_mut(|link| {
            let fate = link.forward(&mut rules);
            match fate {
                Fate::Reset => link.reset(),
                Fate::Cut => {
                    link.cut();
                    self.counts.cuts.fetch_add(1, Ordering::AcqRel);
                }
                Fate::Lives | Fate::Ended => {}
            }
            fate == Fate::Lives
        });
        self.budget = rules.budget;
        self.counts.open.store(self.links.len(), Ordering::Release);
        for direction in [Direction::Requests, Direction::Replies] {
            let count = &self.counts.forwarded[direction as usize];
            count.fetch_add(rules.forwarded[direction as usize], Ordering::AcqRel);
        }
    }

    /// Waits until something can be read, written or accepted, an order comes, or something delayed is due.
    fn wait(&self) {
        let held = self.held();
        let due = self.links.iter().filter_map(|link| link.next_due(held, self.hold_ends)).min();
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|timeout| Timespec::try_from(timeout).expect("a short time"));
        let mut interests = vec![PollFd::new(&self.bell, PollFlags::IN)];
        interests.extend(self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        interests.extend(self.links.iter().flat_map(Link::interests));
        match poll(&mut interests, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }

    fn accept(&mut self) {
        while let Some(Ok((client, _))) = self.listener.as_ref().map(TcpListener::accept) {
            self.counts.accepted.fetch_add(1, Ordering::AcqRel);
            let Some(mut link) = Link::open(client, self.upstream) else { continue };
            link.held = self.hold_process.is_some_and(|pid| owner::has(pid, link.client(), self.port.addr()));
            self.links.push(link);
        }
        self.counts.open.store(self.links.len(), Ordering::Release);
    }
}
