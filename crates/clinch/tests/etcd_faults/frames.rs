//! What HTTP/2 lets a server say of a connection that is whole: that it takes no more requests, and that it has dropped one.

use std::sync::Mutex;
use std::task::{Context, Waker};

use clinch::backend::Freed;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use super::*;

const HEADERS: u8 = 1;
const RESET: u8 = 3;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;

/// Proves that everything before it was taken in.
const MARK: &[u8] = b"frames!!";

/// A proxy that can keep the server's frames back on the first connection, and say something in its name.
struct Frames {
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
    /// Nothing of this request is carried any more.
    dropped: u32,
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
    async fn start(server: SocketAddr) -> Frames {
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
        let (is_held, say, dropped) = {
            let mut state = shared.state.lock().unwrap();
            (state.is_held, std::mem::take(&mut state.say), state.dropped)
        };
        to.write_all(&say).await.ok()?;
        tokio::select! {
            () = shared.said.notified() => {}
            frame = frames.recv(), if !is_held => {
                let frame = frame?;
                if dropped == 0 || stream(&frame) != dropped {
                    to.write_all(&frame).await.ok()?;
                }
            }
        }
    }
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
    frames.state(|state| state.dropped = asked);
    frames.say(&frame(RESET, 0, asked, &[0, 0, 0, 2])).await;
    assert!(within("it is asked again", look).await.unwrap().is_none());
    frames.state(|state| state.is_held = false);
    assert_eq!(join("the release is answered", release).await, Freed::Removed);
}
