//! One connection through the proxy: two sockets, and what is under way between them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;

use super::Direction;

/// Bytes of one direction that a connection holds before it stops reading, so that a test cannot fill the memory.
const ROOM: usize = 16 << 20;

/// Bytes read at a time.
const CHUNK: usize = 64 << 10;

/// How long the server may take to accept.
const CONNECT: Duration = Duration::from_secs(5);

pub(super) struct Link {
    /// The sources of requests and replies; each is the other's destination.
    ends: [TcpStream; 2],
    lanes: [Lane; 2],
    client: SocketAddr,
    /// Nothing is delivered, whatever the proxy does with other connections.
    pub(super) held: bool,
}

/// What is under way in one direction.
#[derive(Default)]
struct Lane {
    queue: VecDeque<(Instant, Item)>,
    /// Bytes in the queue.
    queued: usize,
    /// The source has ended, so there is nothing more to read.
    read_all: bool,
    /// The end of the source has been passed on.
    done: bool,
    /// The destination takes nothing more for now.
    full: bool,
}

enum Item {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// What the proxy allows at this moment.
pub(super) struct Rules {
    pub(super) now: Instant,
    pub(super) held: [bool; 2],
    pub(super) hold_ends: bool,
    /// How many bytes may pass before a cut.
    pub(super) budget: [Option<u64>; 2],
    pub(super) forwarded: [u64; 2],
}

/// What becomes of a connection.
#[derive(PartialEq, Eq)]
pub(super) enum Fate {
    Lives,
    Ended,
    Reset,
    /// Reset because the budget of a direction is used up.
    Cut,
}

impl Link {
    /// Connects to the server for a client; resets the client when that fails.
    pub(super) fn open(client: TcpStream, upstream: SocketAddr) -> Option<Link> {
        let from = client.peer_addr().ok()?;
        let Ok(server) = TcpStream::connect_timeout(&upstream, CONNECT) else {
            reset(&client);
            return None;
        };
        for end in [&client, &server] {
            end.set_nonblocking(true).ok()?;
            end.set_nodelay(true).ok()?;
        }
        Some(Link { ends: [client, server], lanes: Default::default(), client: from, held: false })
    }

    /// The client's end.
    pub(super) fn client(&self) -> SocketAddr {
        self.client
    }

    /// Makes the end of this connection, when it is dropped, a reset.
    pub(super) fn reset(&self) {
        self.ends.iter().for_each(reset);
    }

    /// Makes the end of this connection a reset for the client only.
    ///
    /// Redis in protected mode refuses a client whose connection was reset before it has accepted it, so a reset would
    /// make it a matter of chance whether a request that has passed is executed.
    pub(super) fn cut(&self) {
        reset(&self.ends[0]);
    }

    /// What to wait for.
    pub(super) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        [0, 1].into_iter().filter_map(|end| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, self.lanes[end].reads());
            flags.set(PollFlags::OUT, self.lanes[1 - end].full);
            // Without any interest poll(2) would still tell of a hang-up, again and again.
            (!flags.is_empty()).then(|| PollFd::new(&self.ends[end], flags))
        })
    }

    /// When the next thing that is delayed is due.
    pub(super) fn next_due(&self, held: [bool; 2], hold_ends: bool) -> Option<Instant> {
        let open = self.lanes.iter().zip(held).filter(|(lane, held)| !self.held && !held && !lane.full);
        let next = open.filter_map(|(lane, _)| lane.queue.front());
        next.filter(|(_, item)| !hold_ends || matches!(item, Item::Bytes(_))).map(|(due, _)| *due).min()
    }

    /// Reads what has arrived.
    pub(super) fn read(&mut self, due: Instant) {
        let mut buffer = vec![0; CHUNK];
        for (end, lane) in self.ends.iter_mut().zip(&mut self.lanes).filter(|(_, lane)| lane.reads()) {
            let item = match end.read(&mut buffer) {
                Ok(0) => Item::End,
                Ok(count) => Item::Bytes(buffer[..count].to_vec()),
                Err(error) if is_temporary(error.kind()) => continue,
                Err(_) => Item::Reset,
            };
            lane.push(due, item);
        }
    }

    /// Passes on what is due.
    pub(super) fn forward(&mut self, rules: &mut Rules) -> Fate {
        for direction in [Direction::Requests, Direction::Replies] {
            let fate = self.forward_one(direction as usize, rules);
            if fate != Fate::Lives {
                return fate;
            }
        }
        if self.lanes.iter().all(|lane| lane.done) { Fate::Ended } else { Fate::Lives }
    }

    fn forward_one(&mut self, direction: usize, rules: &mut Rules) -> Fate {
        let lane = &mut self.lanes[direction];
        let destination = &mut self.ends[1 - direction];
        lane.full = false;
        while let Some((due, item)) = lane.queue.front_mut() {
            if self.held || rules.held[direction] || *due > rules.now {
                break;
            }
            match item {
                Item::End | Item::Reset if rules.hold_ends => break,
                Item::Bytes(bytes) => {
                    let allowed = rules.budget[direction].map_or(bytes.len(), |budget| {
                        usize::try_from(budget).unwrap_or(usize::MAX).min(bytes.len())
                    });
                    let written = match destination.write(&bytes[..allowed]) {
                        Ok(written) => written,
                        Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            lane.full = true;
                            break;
                        }
                        Err(_) => return Fate::Reset,
                    };
                    bytes.drain(..written);
                    let empty = bytes.is_empty();
                    lane.queued -= written;
                    rules.forwarded[direction] += written as u64;
                    if empty {
                        lane.queue.pop_front();
                    }
                    if let Some(budget) = &mut rules.budget[direction] {
                        *budget -= written as u64;
                        if *budget == 0 {
                            rules.budget[direction] = None;
                            return Fate::Cut;
                        }
                    }
                }
                Item::End => {
                    let _ = destination.shutdown(Shutdown::Write);
                    lane.done = true;
                    lane.queue.pop_front();
                }
                Item::Reset => return Fate::Reset,
            }
        }
        Fate::Lives
    }
}

impl Lane {
    fn reads(&self) -> bool {
        !self.read_all && self.queued < ROOM
    }

    /// Appends what was read; never before what was read earlier, also when the delay has become shorter.
    fn push(&mut self, due: Instant, item: Item) {
        match &item {
            Item::Bytes(bytes) => self.queued += bytes.len(),
            Item::End | Item::Reset => self.read_all = true,
        }
        let due = self.queue.back().map_or(due, |(last, _)| due.max(*last));
        self.queue.push_back((due, item));
    }
}

fn is_temporary(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// With no time to linger, closing a socket sends an RST.
fn reset(socket: &TcpStream) {
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}
