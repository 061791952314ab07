//! A proxy that knows one request when it sees it.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::*;

/// What becomes of the request that is looked for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fate {
    /// It waits. Once it is let go the server answers it, but nobody hears that.
    Late,
    /// It never arrives, for the connection breaks.
    Lost,
    /// It passes at once, but what the server answers, and all that it answers after that on this connection, waits until it is
    /// let go.
    Slow,
    /// It is the last that passes: from then on nothing does, either way, until that is over.
    Last,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Looking,
    Caught(Fate),
    LetGo,
    Answered,
}

type Wanted = (Box<dyn Fn(&[u8]) -> bool + Send>, Fate);

pub(super) struct Sieve {
    addr: SocketAddr,
    state: Arc<State>,
}

struct State {
    wanted: Mutex<Option<Wanted>>,
    phase: watch::Sender<Phase>,
    /// Connections that there were.
    accepted: AtomicUsize,
}

impl Sieve {
    pub(super) async fn start(server: SocketAddr) -> Sieve {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State {
            wanted: Mutex::default(),
            phase: watch::channel(Phase::Looking).0,
            accepted: AtomicUsize::new(0),
        });
        let all = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let state = all.clone();
                state.accepted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move { state.carry(client, server).await });
            }
        });
        Sieve { addr, state }
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(super) fn url(&self) -> String {
        format!("etcd://{}", self.addr)
    }

    pub(super) fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::Relaxed)
    }

    /// Looks for a request.
    pub(super) fn catch(&self, fate: Fate, is_it: impl Fn(&[u8]) -> bool + Send + 'static) {
        self.state.phase.send_replace(Phase::Looking);
        *self.state.wanted.lock().unwrap() = Some((Box::new(is_it), fate));
    }

    /// Waits until it is sent, and where it passes at once, until the server has answered it.
    pub(super) async fn caught(&self) {
        within("it is sent", self.state.until(|phase| phase != Phase::Looking)).await;
    }

    /// Lets a late request go, and waits until the server has answered it; or opens the way again.
    pub(super) async fn let_go(&self) {
        if self.state.phase.send_replace(Phase::LetGo) == Phase::Caught(Fate::Late) {
            within("it is answered", self.state.until(|phase| phase == Phase::Answered)).await;
        }
    }
}

impl State {
    async fn until(&self, is_it: impl Fn(Phase) -> bool) {
        self.phase.subscribe().wait_for(|phase| is_it(*phase)).await.unwrap();
    }

    fn is_cut(&self) -> bool {
        *self.phase.borrow() == Phase::Caught(Fate::Last)
    }

    /// Carries a connection until either end is gone, or it has missed something.
    async fn carry(&self, mut client: TcpStream, server: SocketAddr) -> Option<()> {
        let mut server = TcpStream::connect(server).await.ok()?;
        let (mut up, mut down) = (vec![0; 65536], vec![0; 65536]);
        let mut is_slow = false;
        loop {
            let sent = tokio::select! {
                count = client.read(&mut up) => Ok(up.get(..count.ok()?)?),
                count = server.read(&mut down), if !is_slow => Err(down.get(..count.ok()?)?),
                () = self.until(|phase| phase == Phase::LetGo), if is_slow => {
                    is_slow = false;
                    continue;
                }
            };
            if self.is_cut() {
                self.until(|phase| phase == Phase::LetGo).await;
                return None;
            }
            match sent {
                Ok([]) | Err([]) => return None,
                Err(answer) => client.write_all(answer).await.ok()?,
                Ok(request) => {
                    let caught = self.wanted.lock().unwrap().take_if(|(is_it, _)| is_it(request));
                    let caught = caught.map(|(_, fate)| fate);
                    if caught == Some(Fate::Slow) {
                        is_slow = true;
                        server.write_all(request).await.ok()?;
                        server.readable().await.ok()?;
                        self.phase.send_replace(Phase::Caught(Fate::Slow));
                        continue;
                    }
                    if let Some(fate) = caught {
                        self.phase.send_replace(Phase::Caught(fate));
                    }
                    if caught == Some(Fate::Lost) {
                        return None;
                    }
                    if caught == Some(Fate::Late) {
                        self.until(|phase| phase == Phase::LetGo).await;
                        while server.try_read(&mut down).is_ok_and(|count| count > 0) {}
                        server.write_all(request).await.ok()?;
                        let mut count = server.read(&mut down).await.ok()?;
                        while !is_answer(down.get(..count)?) {
                            count = server.read(&mut down).await.ok()?;
                        }
                        self.phase.send_replace(Phase::Answered);
                        return None;
                    }
                    server.write_all(request).await.ok()?;
                }
            }
        }
    }
}

/// Whether what a server sends, in whole frames, holds more than pings, settings and windows; or nothing, since it has ended.
fn is_answer(mut sent: &[u8]) -> bool {
    const CONNECTION: [u8; 3] = [4, 6, 8];
    let is_over = sent.is_empty();
    while let [a, b, c, kind, ..] = *sent {
        if !CONNECTION.contains(&kind) {
            return true;
        }
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        sent = sent.get(9 + length..).unwrap_or_default();
    }
    is_over
}
