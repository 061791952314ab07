//! What HTTP/2 lets a server say of a connection that is whole: that it takes no more requests, and that it has dropped one.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::task::{Context, Waker};

use clinch::backend::{Freed, NOTICE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use super::turns::contains;
use super::*;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;

/// What a job that is told to end has of the notice.
const TO_STOP: Duration = Duration::from_secs(4);

/// Proves that everything before it was taken in.
const MARK: &[u8] = b"frames!!";

/// The end of a stream, with its headers whole.
const END: u8 = 0x05;

/// A proxy that can keep the server's frames back on the first connection, and say something in its name.
pub(super) struct Frames {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    said: Notify,
    accepted: AtomicUsize,
}

#[derive(Default)]
struct State {
    is_held: bool,
    /// What the server is made to say next.
    say: Vec<u8>,
    /// The last request that the client has begun.
    last: u32,
    is_marked: bool,
    /// Nothing that the server says of these requests is carried any more.
    dropped: BTreeSet<u32>,
    /// Nor of those that name a key, from now on: as of a member whose disk hangs, which passes keepalives on to the leader.
    is_stale: bool,
    /// The next request that is like this is answered, but with the words of a server that is full.
    refuse: Option<IsIt>,
    refused: Option<u32>,
}

type IsIt = Box<dyn Fn(&[u8]) -> bool + Send>;

impl State {
    fn hang_the_disk(&mut self) {
        self.is_stale = true;
        self.dropped.extend(1..=self.last);
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    [&length.to_be_bytes()[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

async fn next(from: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let mut frame = vec![0; 9];
    from.read_exact(&mut frame).await.ok()?;
    let length = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]);
    frame.resize(9 + length as usize, 0);
    from.read_exact(&mut frame[9..]).await.ok()?;
    Some(frame)
}

fn stream(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[5..9].try_into().unwrap())
}

impl Frames {
    pub(super) async fn start(server: SocketAddr) -> Frames {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, shared) = (listener.local_addr().unwrap(), Arc::<Shared>::default());
        let all = shared.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut upstream = TcpStream::connect(server).await.unwrap();
                if all.accepted.fetch_add(1, Ordering::Relaxed) > 0 {
                    tokio::spawn(
                        async move { tokio::io::copy_bidirectional(&mut client, &mut upstream).await },
                    );
                    continue;
                }
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), upstream.into_split());
                tokio::spawn(up(all.clone(), from_client, to_server));
                tokio::spawn(down(all.clone(), from_server, to_client));
            }
        });
        Frames { addr, shared }
    }

    pub(super) fn url(&self) -> String {
        format!("etcd://{}", self.addr)
    }

    /// Has the server refuse the next request that is like this once it is applied, as one does whose quota is crossed meanwhile.
    pub(super) fn refuse(&self, is_it: impl Fn(&[u8]) -> bool + Send + 'static) {
        self.state(|state| state.refuse = Some(Box::new(is_it)));
    }

    /// Whether it has refused that.
    pub(super) fn has_refused(&self) -> bool {
        self.state(|state| state.refuse.is_none() && state.refused.is_none())
    }

    /// Keeps back what the server says.
    pub(super) fn hold(&self, is_held: bool) {
        self.state(|state| state.is_held = is_held);
    }

    fn state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.shared.state.lock().unwrap());
        self.shared.said.notify_one();
        changed
    }

    /// Has the server say this, and waits until the client has taken it in.
    async fn say(&self, frame: &[u8]) {
        let mark = self::frame(PING, 0, 0, MARK);
        self.state(|state| state.say = [frame, &mark].concat());
        eventually("it is heard", async || self.state(|state| state.is_marked).then_some(())).await;
    }
}

async fn up(shared: Arc<Shared>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Option<()> {
    let mut preface = [0; 24];
    from.read_exact(&mut preface).await.ok()?;
    to.write_all(&preface).await.ok()?;
    loop {
        let frame = next(&mut from).await?;
        {
            let mut state = shared.state.lock().unwrap();
            if frame[3] == HEADERS {
                state.last = stream(&frame);
            }
            if frame[3] == DATA && state.is_stale && contains(&frame[9..], b"/clinch/") {
                state.dropped.insert(stream(&frame));
            }
            if frame[3] == DATA && state.refuse.take_if(|is_it| is_it(&frame[9..])).is_some() {
                state.refused = Some(stream(&frame));
            }
            if frame[3] == PING && frame[9..] == *MARK {
                state.is_marked = true;
                continue;
            }
        }
        to.write_all(&frame).await.ok()?;
    }
}

async fn down(shared: Arc<Shared>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Option<()> {
    let (sender, mut frames) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(frame) = next(&mut from).await {
            let _ = sender.send(frame);
        }
    });
    loop {
        let (is_held, say) = {
            let mut state = shared.state.lock().unwrap();
            (state.is_held, std::mem::take(&mut state.say))
        };
        to.write_all(&say).await.ok()?;
        tokio::select! {
            () = shared.said.notified() => {}
            frame = frames.recv(), if !is_held => {
                let mut frame = frame?;
                let is_dropped = {
                    let mut state = shared.state.lock().unwrap();
                    let is_refused = state.refused == Some(stream(&frame));
                    let is_end = frame[3] == HEADERS && frame[4] & END == END;
                    if is_refused && is_end {
                        frame = self::frame(HEADERS, END, stream(&frame), &full());
                        state.refused = None;
                    }
                    is_refused && !is_end || state.dropped.contains(&stream(&frame))
                };
                if !is_dropped {
                    to.write_all(&frame).await.ok()?;
                }
            }
        }
    }
}

/// The head of an answer that a full server gives, packed without a table.
fn full() -> Vec<u8> {
    let fields = [
        ("content-type", "application/grpc"),
        ("grpc-status", "8"),
        ("grpc-message", "etcdserver: mvcc: database space exceeded"),
    ];
    let pack = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let fields = fields.map(|(name, value)| [vec![0], pack(name), pack(value)].concat()).concat();
    [vec![0x88], fields].concat()
}

/// A client with a release on its way whose answer is kept back.
async fn releasing(etcd: &Etcd) -> (Frames, Arc<dyn Backend>, JoinHandle<Freed>) {
    let frames = Frames::start(etcd.addr()).await;
    let backend = open(&format!("etcd://{}", frames.addr)).await;
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    let deletes = etcd.handled("DeleteRange");
    frames.state(|state| state.is_held = true);
    let releaser = backend.clone();
    let release = tokio::spawn(async move { releaser.release(&claim, Duration::ZERO).await.unwrap() });
    eventually("it is done", async || (etcd.handled("DeleteRange") > deletes).then_some(())).await;
    (frames, backend, release)
}

/// A server that stops in good order, or a balancer before it, takes no new requests and answers those that it has.
#[tokio::test]
async fn a_connection_that_takes_no_more_requests_answers_those_that_it_has() {
    let etcd = Etcd::start();
    let (frames, backend, release) = releasing(&etcd).await;
    let before = frames.shared.accepted.load(Ordering::Relaxed);
    frames.say(&frame(GO_AWAY, 0, 0, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0])).await;
    // A write, which is never sent twice: nor is it now, for it was not sent at all.
    ghosts::granted(&*backend, &ghosts::claim(2, "other", LONG_TTL)).await;
    assert_eq!(
        frames.shared.accepted.load(Ordering::Relaxed),
        before + 1,
        "new requests take a new connection"
    );
    frames.state(|state| state.is_held = false);
    assert_eq!(join("the release is answered", release).await, Freed::Removed);
}

/// A request that the server drops is no sign that it drops others.
#[tokio::test]
async fn a_request_that_is_reset_takes_no_other_along() {
    let etcd = Etcd::start();
    let (frames, backend, release) = releasing(&etcd).await;
    let (last, name) = (frames.state(|state| state.last), clinch::LockName::new("other").unwrap());
    let mut look = Box::pin(backend.state(&name));
    assert!(look.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let asked = async || Some(frames.state(|state| state.last)).filter(|now| *now > last);
    let asked = eventually("it is asked", asked).await;
    frames.state(|state| state.dropped.insert(asked));
    frames.say(&frame(RESET, 0, asked, &[0, 0, 0, 2])).await;
    assert!(within("it is asked again", look).await.unwrap().is_none());
    frames.state(|state| state.is_held = false);
    assert_eq!(join("the release is answered", release).await, Freed::Removed);
}

/// A member whose disk hangs tells of nothing that happens, neither by its watches nor to who reads; keepalives it passes on to the
/// leader. Its clients are told of an eviction in time all the same, however long their leases.
#[tokio::test]
async fn an_eviction_is_told_within_the_notice_past_a_member_whose_disk_hangs() {
    let etcd = Etcd::start();
    let told = [30, 600].map(async |seconds| {
        let frames = Frames::start(etcd.addr()).await;
        // The second way, which is straight, stands for another member.
        let url = format!("etcd://{0},{0}", frames.addr);
        let env = Env::host(Lane::here().unwrap());
        let locks = Locks::connect(&url, env.clone()).await.unwrap();
        let name = format!("job-{seconds}");
        let guard = lock(&locks.ttl(Duration::from_secs(seconds)).unwrap(), &name).await;
        let operator = open(&etcd.url()).await;
        let id = operator.state(guard.name()).await.unwrap().unwrap().claims[0].id;
        frames.state(State::hang_the_disk);
        let evicted = env.clock().now();
        assert_eq!(operator.evict(guard.name(), id).await.unwrap(), Freed::Removed);
        within("the holder is told", guard.lost()).await;
        let took = env.clock().now().since(evicted);
        assert!(took < NOTICE - TO_STOP, "told after {took:?} with a TTL of {seconds} s");
        guard.release().await.unwrap();
    });
    futures_util::future::join_all(told).await;
}
