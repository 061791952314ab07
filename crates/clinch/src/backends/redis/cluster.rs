//! The servers of a Cluster: who has which slots, found out once for all who want to know.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::dial::Dialer;
use super::resp::Command;
use super::route::Node;
use super::settings::Address;
use super::slots::{Map, View};
use crate::backends::pool::{Connection, Pool};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// For how long what was learnt is not asked for again: when a master dies, all who wait for its locks want to know.
const PAUSE: Duration = Duration::from_millis(250);

/// A Cluster, as far as is known.
pub(super) struct Cluster {
    seeds: Arc<[Address]>,
    map: Arc<Mutex<Map>>,
    lessons: Pool<Lesson>,
}

/// That the map was learnt. It counts for a while from when the first who waited for it looks.
struct Lesson {
    until: OnceLock<Instant>,
    env: Env,
}

impl Connection for Lesson {
    fn is_open(&self) -> bool {
        let now = self.env.now();
        now < *self.until.get_or_init(|| now + PAUSE)
    }
}

impl Cluster {
    pub(super) fn new(seeds: &[Address]) -> Cluster {
        Cluster { seeds: seeds.into(), map: Arc::default(), lessons: Pool::default() }
    }

    /// The servers that the URL names.
    pub(super) fn seeds(&self) -> &[Address] {
        &self.seeds
    }

    /// The server that has a slot, as far as is known.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        lock(&self.map).owner(slot)
    }

    /// The servers that have slots, as far as is known.
    pub(super) fn owners(&self) -> Vec<Arc<Node>> {
        lock(&self.map).owners()
    }

    /// The server at an address that another has named; with `moved` it has the slot from now on.
    pub(super) fn redirected(&self, slot: u16, address: Address, moved: bool) -> Arc<Node> {
        let mut map = lock(&self.map);
        let node = map.node(address);
        if moved {
            map.assign(slot, node.clone());
        }
        node
    }

    /// After a server did not answer: finds out who has its slots now. What others know is as good as it gets.
    pub(super) async fn mistrust(&self, dialer: &Arc<Dialer>, node: &Arc<Node>) {
        lock(&self.map).mistrust(node);
        if self.learn(dialer).await.is_err() {
            lock(&self.map).forget(node);
        }
    }

    /// Finds out who has which slots, together with everybody else who wants to know, and not again right after that.
    pub(super) async fn learn(&self, dialer: &Arc<Dialer>) -> Result<()> {
        let lesson = || {
            let (dialer, seeds, map) = (dialer.clone(), self.seeds.clone(), self.map.clone());
            async move {
                ask_all(&dialer, &seeds, &map).await?;
                Ok(Lesson { until: OnceLock::new(), env: dialer.env.clone() })
            }
        };
        self.lessons.get(&dialer.env, lesson).await.map(drop)
    }
}

/// Asks the servers who has which slots; the first counts that belongs to the cluster that is known. One that did not answer
/// lately is asked after all others. What belongs to none is believed only of a server that the URL names, and if nobody
/// knows better: the cluster was made anew.
async fn ask_all(dialer: &Arc<Dialer>, seeds: &[Address], map: &Mutex<Map>) -> Result<()> {
    let mut failure = Error::new(ErrorKind::Unavailable, "only servers of another cluster answered");
    let mut anew = None;
    let known = lock(map).known(seeds);
    for nodes in known {
        let ask = |node: Arc<Node>| async move { (ask_one(dialer, &node).await, node) };
        let mut asked: FuturesUnordered<_> = nodes.into_iter().map(ask).collect();
        while let Some((answer, node)) = asked.next().await {
            match answer {
                Ok(view) => {
                    let mut map = lock(map);
                    if map.is_of_this_cluster(&view) {
                        map.replace(view, seeds);
                        return Ok(());
                    }
                    if node.is_one_of(seeds) {
                        anew.get_or_insert(view);
                    }
                }
                Err(error) => failure = error,
            }
        }
    }
    let view = anew.ok_or(failure)?;
    lock(map).replace(view, seeds);
    Ok(())
}

async fn ask_one(dialer: &Arc<Dialer>, node: &Arc<Node>) -> Result<View> {
    let link = node.link(dialer).await?;
    let mut command = Command::new("CLUSTER");
    command.arg("SLOTS");
    let answer = link.call(&command).await.map_err(|failure| {
        let is_none = failure.detail().contains("cluster support disabled");
        let error = failure.into_error(link.server());
        if is_none { error.with_remedy(dialer.settings.one_server()) } else { error }
    })?;
    let view = View::read(&answer, node.endpoint())?;
    if view.ranges.is_empty() {
        let message = format!("{} knows no slots; is the cluster complete?", link.server());
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    Ok(view)
}
