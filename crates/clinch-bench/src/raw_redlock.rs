//! The floor on several Redis servers: the two commands of a lock to all of them at once, with no logic.

use std::collections::VecDeque;

use rustix::event::{PollFd, PollFlags, poll};

use crate::Result;
use crate::raw_redis::{FREED, Plain, Raw, TAKEN};

/// Locks and releases on all servers, and waits for so many of them.
#[derive(Debug)]
pub(crate) struct RawQuorum {
    servers: Vec<Server>,
    plain: Plain,
    needed: usize,
}

#[derive(Debug)]
struct Server {
    raw: Raw,
    /// The answers that have not come yet.
    due: VecDeque<&'static [u8]>,
}

impl RawQuorum {
    /// Connects to all servers. The locks' names begin with `name`; each step waits for `needed` answers.
    pub(crate) fn connect(urls: &[String], name: &str, needed: usize) -> Result<RawQuorum> {
        let mut servers = Vec::new();
        let mut script = String::new();
        for url in urls {
            let mut raw = Raw::connect(url)?;
            script = raw.load_release()?;
            servers.push(Server { raw, due: VecDeque::new() });
        }
        Ok(RawQuorum { plain: Plain::new(name, 0, &script)?, servers, needed })
    }

    /// Takes the lock of this number.
    pub(crate) fn take(&mut self, number: u64) -> Result<()> {
        self.plain.renumber(number);
        for server in &mut self.servers {
            server.raw.send(&self.plain.take)?;
            server.due.push_back(TAKEN);
        }
        self.wait_for(self.needed)
    }

    /// Frees the lock that was taken last.
    pub(crate) fn free(&mut self) -> Result<()> {
        for server in &mut self.servers {
            server.raw.send(&self.plain.free)?;
            server.due.push_back(FREED);
        }
        self.wait_for(self.needed)
    }

    /// Takes the answers that nobody waited for.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.wait_for(self.servers.len())
    }

    /// Waits until so many servers have answered everything.
    fn wait_for(&mut self, needed: usize) -> Result<()> {
        if needed == self.servers.len() {
            // One after the other: the last answer ends the wait in any order.
            return self.servers.iter_mut().try_for_each(Server::take_all);
        }
        while self.servers.iter().filter(|server| server.due.is_empty()).count() < needed {
            let behind = self.servers.iter().filter(|server| !server.due.is_empty());
            let mut waiting: Vec<PollFd<'_>> =
                behind.map(|server| PollFd::new(&server.raw, PollFlags::IN)).collect();
            poll(&mut waiting, None)?;
            let ready: Vec<bool> = waiting.iter().map(|poll| !poll.revents().is_empty()).collect();
            let behind = self.servers.iter_mut().filter(|server| !server.due.is_empty());
            for (server, _) in behind.zip(ready).filter(|(_, ready)| *ready) {
                server.take_some()?;
            }
        }
        Ok(())
    }
}

impl Server {
    fn take_all(&mut self) -> Result<()> {
        while let Some(answer) = self.due.pop_front() {
            self.raw.expect(answer)?;
        }
        Ok(())
    }

    /// Takes what one read brings.
    fn take_some(&mut self) -> Result<()> {
        while let Some(answer) = self.due.pop_front() {
            self.raw.expect(answer)?;
            if !self.raw.has_more() {
                break;
            }
        }
        Ok(())
    }
}
