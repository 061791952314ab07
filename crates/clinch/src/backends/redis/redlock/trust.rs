//! Whose vote counts: what clients leave on the servers is compared with what this client sees, and brought up to date.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::super::keys::FENCE;
use super::super::reply;
use super::super::resp::{Command, Sixteen, Value};
use super::super::script;
use super::node::{Abstention, Acquaintance, Left, Node, Standing, process};
use super::round::Round;
use super::settings::Rules;
use super::timing::{Evenness, Lead, Offset};
use super::votes::quorum;
use super::voucher::{Renewed, Terms, View, Voucher, Word};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::Result;
use crate::sync::{AtWork, lock};
use crate::token::Token;

/// For how long a server is waited for, at least.
const PATIENCE: Duration = Duration::from_millis(100);

/// How often, at most, it is looked whether there is something to leave on the servers.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// How often, at most, a server is looked at that does not vote, and so tells nothing by its votes.
const LOOK_AGAIN: Duration = Duration::from_millis(900);

/// Whose vote counts.
pub(super) struct Trust {
    env: Env,
    nodes: Vec<Arc<Node>>,
    rules: Rules,
    /// What each server is called in vouchers, one bit for each: clients may name the servers in any order.
    names: Vec<u64>,
    pub(super) terms: Terms,
    /// When it is looked again whether there is something to leave on the servers; nanoseconds since boot.
    due: AtomicU64,
    /// When those are looked at again that do not vote.
    looks: AtomicU64,
    /// Who leaves something on the servers.
    telling: Mutex<AtWork>,
}

/// Something to leave on a server.
struct News {
    at: usize,
    run: String,
    before: String,
    word: Renewed,
    /// It may have forgotten its fence, and was not given those of enough others yet.
    learns: bool,
}

impl Trust {
    pub(super) fn new(env: Env, nodes: Vec<Arc<Node>>, rules: Rules) -> Trust {
        let evenness = Evenness { drift: env.drift(), max_ttl: rules.max_ttl };
        // One more than a minority, less the server itself.
        let witnesses = nodes.len() - quorum(nodes.len());
        let terms = Terms { evenness, witnesses, durable: rules.durable };
        let place = |node: &Arc<Node>| {
            let before = |other: &&Arc<Node>| other.address.to_string() < node.address.to_string();
            1 << nodes.iter().filter(before).count()
        };
        let names = nodes.iter().map(place).collect();
        Trust {
            env,
            nodes,
            rules,
            names,
            terms,
            due: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            telling: Mutex::default(),
        }
    }

    /// Why the vote of a server does not count at this moment, if it does not.
    pub(super) fn abstention(&self, at: usize, now: Instant) -> Option<Abstention> {
        let node = self.nodes.get(at)?;
        let own = match node.standing(now) {
            Standing::Votes => return None,
            Standing::Abstains(own) => return Some(own),
            Standing::Unless(own) => own,
        };
        self.due.store(0, Ordering::Relaxed);
        let Some(met) = node.acquaintance() else { return Some(own) };
        let leads = self.leads(at, met.clock, now);
        match Voucher::judge(met.left.voucher.as_ref(), &self.view(&met, &leads, now), self.terms) {
            Word::In(Duration::ZERO) if node.trust(&met.run) => None,
            Word::In(Duration::ZERO) => Some(own),
            Word::In(left) => Some(Abstention { until: own.until.min(now + left), why: own.why }),
            Word::Apart => {
                Some(Abstention { why: "its clock and another server's have come apart".to_owned(), ..own })
            }
            Word::Unknown => Some(own),
        }
    }

    /// How far the clocks of the others are ahead of a server's, as far as they were read lately, by what a voucher calls them.
    fn leads(&self, of: usize, clock: Offset, now: Instant) -> Vec<(String, Lead)> {
        let Terms { evenness, durable, .. } = self.terms;
        let others = self.nodes.iter().enumerate().filter(|(at, _)| *at != of);
        let mut leads: Vec<(String, Lead)> = others
            .filter_map(|(_, node)| Some((node, node.acquaintance()?)))
            .filter(|(_, met)| (durable || !met.run.is_empty()) && met.clock.is_fresh(now))
            .map(|(node, met)| {
                // Not by its run: a clock stays what it is when the data change.
                let name = if durable { node.address.to_string() } else { process(&met.run).to_owned() };
                (name, met.clock.ahead_of(clock, now, evenness))
            })
            .collect();
        leads.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        leads.dedup_by(|(one, _), (other, _)| one == other);
        leads
    }

    fn view<'a>(&self, met: &'a Acquaintance, leads: &'a [(String, Lead)], now: Instant) -> View<'a> {
        let evenness = self.terms.evenness;
        let (earliest, latest) = (met.clock.earliest_us(now, evenness), met.clock.latest_us(now, evenness));
        View { run: &met.run, earliest, latest, leads }
    }

    /// Whether it is time to look if there is something to leave on the servers.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.load(Ordering::Relaxed) <= now.as_nanos()
    }

    /// Leaves word on the servers that are known by now, and answers what can be left later. What is new to them is waited
    /// for: somebody who tries once and ends would otherwise leave nothing, and so would all that come after.
    pub(super) async fn begin(self: &Arc<Trust>) -> Option<impl Future<Output = ()> + Send + use<>> {
        // Whose vote counts now is known for good. What was read goes stale.
        self.voters(self.env.now());
        let news = self.news();
        if news.iter().any(|news| news.word.is_new) {
            self.tell(news).await;
            return None;
        }
        let trust = self.clone();
        (!news.is_empty()).then_some(async move { trust.tell(news).await })
    }

    /// Waits for the servers that are not known yet, and leaves word on each when it is: a client that lives for a moment would never
    /// do so on one that is far away.
    pub(super) async fn begin_late(self: Arc<Trust>) {
        let unknown = self.nodes.iter().filter(|node| node.acquaintance().is_none());
        let meet = |node: &Arc<Node>| {
            let node = node.clone();
            async move { node.line().await.is_ok() }
        };
        let mut meeting: FuturesUnordered<_> = unknown.map(meet).collect();
        while let Some(is_met) = meeting.next().await {
            if is_met && let Some(rest) = self.begin().await {
                rest.await;
            }
        }
    }

    /// Leaves word on the servers of which there is something to tell, unless somebody is about to: of many claims at a time one
    /// is enough.
    pub(super) async fn vouch(self: Arc<Trust>) {
        let Some(_alone) = lock(&self.telling).begin() else { return };
        self.look().await;
        self.tell(self.news()).await;
    }

    /// How many votes count at this moment.
    fn voters(&self, now: Instant) -> usize {
        (0..self.nodes.len()).filter(|at| self.abstention(*at, now).is_none()).count()
    }

    /// Reads the clocks that were not read lately, where too few votes count and some might if these were: of a client that has
    /// done nothing for a while. By its votes it would not learn that, since it asks for none.
    pub(super) async fn refresh(&self) {
        let now = self.env.now();
        let is_stale = |node: &Node| node.acquaintance().is_some_and(|met| !met.clock.is_fresh(now));
        let is_unsure = |node: &Node| matches!(node.standing(now), Standing::Unless(_));
        let nodes = || self.nodes.iter().map(|node| &**node);
        if self.voters(now) < quorum(self.nodes.len()) && nodes().any(is_stale) && nodes().any(is_unsure) {
            self.read(is_stale).await;
        }
    }

    /// Reads the clocks of servers that do not vote, and what was left on them: both would go stale while somebody waits, and
    /// nobody could tell any more whether their votes count.
    async fn look(&self) {
        let now = self.env.now();
        if self.looks.load(Ordering::Relaxed) <= now.as_nanos() {
            self.looks.store((now + LOOK_AGAIN).as_nanos(), Ordering::Relaxed);
            self.read(|node| !matches!(node.standing(now), Standing::Votes)).await;
        }
    }

    /// Reads the clocks of some servers, and what was left on them.
    async fn read(&self, which: impl Fn(&Node) -> bool) {
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate().filter(|(_, node)| which(node)) {
            round.ask(at, self.patience(node), node.clone().look());
        }
        round.answers(|_, _| false).await;
    }

    /// What there is to tell.
    fn news(&self) -> Vec<News> {
        let now = self.env.now();
        let again = now + LOOK_EVERY.min(self.rules.max_ttl);
        self.due.store(again.as_nanos(), Ordering::Relaxed);
        let news = |(at, node): (usize, &Arc<Node>)| {
            let met = node.acquaintance()?;
            if (met.run.is_empty() && !self.terms.durable) || !met.clock.is_fresh(now) {
                return None;
            }
            let leads = self.leads(at, met.clock, now);
            let known = met.left.voucher.as_ref();
            let told = Voucher::told(known, &met.run);
            let learns = self.rules.fencing && !self.is_enough(told);
            let learn = learns && self.tellers(now) & !self.name(at) & !told != 0;
            let word = Voucher::renewed(known, &self.view(&met, &leads, now), learn, self.terms)?;
            Some(News { at, run: met.run, before: met.left.text, word, learns })
        };
        self.nodes.iter().enumerate().filter_map(news).collect()
    }

    /// Whether a server was given the fences of so many others that one of each quorum, whether or not it was in it, is among
    /// them: the largest of these is no smaller than any token that was given out.
    fn is_enough(&self, told: u64) -> bool {
        told.count_ones() as usize > self.nodes.len() - quorum(self.nodes.len())
    }

    /// The servers that were there lately and know all tokens that they must: those that have themselves been given enough fences.
    /// Where a majority has not, as on new servers, nobody knows more than they do.
    fn tellers(&self, now: Instant) -> u64 {
        let (mut all, mut complete) = (0, 0_u64);
        let mut incomplete = 0;
        for (node, name) in self.nodes.iter().zip(&self.names) {
            let Some(met) = node.acquaintance().filter(|met| met.clock.is_fresh(now)) else { continue };
            all |= name;
            match self.is_enough(Voucher::told(met.left.voucher.as_ref(), &met.run)) {
                true => complete |= name,
                false => incomplete += 1,
            }
        }
        if incomplete >= quorum(self.nodes.len()) { all } else { complete }
    }

    /// What a server is called in vouchers.
    fn name(&self, at: usize) -> u64 {
        self.names.get(at).copied().unwrap_or(0)
    }

    async fn tell(&self, news: Vec<News>) {
        let fences = match news.iter().any(|news| news.learns) {
            true => self.fences().await,
            false => Vec::new(),
        };
        let fence = fences.iter().map(|(_, fence)| *fence).max().unwrap_or(0);
        let heard = fences.iter().fold(0, |all, (other, _)| all | self.name(*other));
        // Known only now: one may have restarted until it was asked.
        let tellers = self.tellers(self.env.now());
        let mut round = Round::new(&self.env, self.nodes.len());
        for News { at, run, before, mut word, learns } in news {
            let Some(node) = self.nodes.get(at).cloned() else { continue };
            let heard = heard & !self.name(at);
            word.voucher.told |= heard & tellers;
            // Some are needed at least. What the others know it is told by whoever meets them: they may be away for good.
            let enough = self.nodes.len() - quorum(self.nodes.len());
            if learns && ((word.voucher.told | heard).count_ones() as usize) < enough {
                self.due.store(0, Ordering::Relaxed);
                continue;
            }
            let keys = [node.group.key.as_str(), FENCE];
            let keys = if learns && fence > 0 { &keys[..] } else { &keys[..1] };
            let mut command = script::REDLOCK_VOUCH.on(keys.iter().copied());
            command.arg(before).arg([node.group.terms(), &word.voucher.to_string()]).arg(Sixteen(fence));
            command.arg(node.group.terms());
            round.ask(at, self.patience(&node), leave(node, run, command));
        }
        round
            .answers(|at, answer| {
                if let Some(node) = self.nodes.get(at) {
                    node.told(answer);
                }
                false
            })
            .await;
    }

    fn patience(&self, node: &Node) -> Duration {
        node.patience(self.rules.max_ttl).max(PATIENCE)
    }

    /// The fences of all servers that answer.
    async fn fences(&self) -> Vec<(usize, u64)> {
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            let node = node.clone();
            round.ask(at, self.patience(&node), async move {
                let line = node.line().await?;
                let mut get = Command::new("GET");
                get.arg(FENCE);
                let fence = node.call_on(&line, [&get]).await?;
                // What is no token any more was never given out.
                let token =
                    |fence: &Value| fence.text()?.parse().ok().filter(|token| *token < Token::MAX.get());
                Ok(fence.first().and_then(token).unwrap_or(0))
            });
        }
        let mut fences = Vec::new();
        round
            .answers(|at, fence| {
                fences.extend(fence.ok().map(|fence| (at, fence)));
                false
            })
            .await;
        fences
    }
}

/// Leaves something on a run of a server, and notes what stands there then.
async fn leave(node: Arc<Node>, run: String, command: Command) -> Result<()> {
    let line = node.line().await?;
    if line.run() == run {
        let stands = node.run_on(&line, &script::REDLOCK_VOUCH, &command).await?;
        node.left(&line, Left::read(reply::lossy(&stands), &node.group));
    }
    Ok(())
}
