//! How a Redis server shall be started.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::clock;
use crate::port::Port;
use crate::process::{Process, temp_dir};
use crate::redis::Redis;
use crate::tls::Certificates;

/// How often another port is tried when somebody else has the one that was free a moment ago.
const ATTEMPTS: usize = 5;

/// What a [`Redis`] shall be like.
#[derive(Debug, Default)]
pub struct RedisBuilder {
    binary: Option<PathBuf>,
    args: Vec<String>,
    listen: Listen,
    cluster: bool,
    sentinel: Option<String>,
    password: Option<String>,
    master: Option<(SocketAddr, Option<String>)>,
    stepped: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Listen {
    #[default]
    Tcp,
    Tls,
    Unix,
}

impl RedisBuilder {
    /// Sets an option of the server, such as `--maxmemory-policy`; a value with blanks counts as several words.
    ///
    /// What is set here comes last and so overrides what the kit sets.
    pub fn arg(mut self, name: &str, value: &str) -> RedisBuilder {
        self.args.push(name.to_owned());
        let words = value.split_whitespace().map(str::to_owned);
        self.args.extend(if value.is_empty() { vec![String::new()] } else { words.collect() });
        self
    }

    /// Starts another executable than `redis-server`.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> RedisBuilder {
        self.binary = Some(path.into());
        self
    }

    /// Listens on a Unix socket only.
    pub fn unix_socket(mut self) -> RedisBuilder {
        self.listen = Listen::Unix;
        self
    }

    /// Speaks only TLS on its port, with [`certificates`](Redis::certificates) of its own. Clients may show theirs;
    /// `.arg("--tls-auth-clients", "yes")` demands it.
    pub fn tls(mut self) -> RedisBuilder {
        self.listen = Listen::Tls;
        self
    }

    /// Gives the default user a password, which must not need escaping in a URL.
    pub fn password(mut self, password: &str) -> RedisBuilder {
        self.password = Some(password.to_owned());
        self
    }

    /// Adds a user with rules as `ACL SETUSER` takes them.
    pub fn acl_user(self, name: &str, rules: &str) -> RedisBuilder {
        self.arg("--user", &format!("{name} {rules}"))
    }

    /// Gives the server a wall clock that [`step_clock`](Redis::step_clock) can step. Needs a C compiler, as every Rust
    /// toolchain does to link.
    pub fn stepped_clock(mut self) -> RedisBuilder {
        self.stepped = true;
        self
    }

    /// Makes the server a replica of another.
    pub fn replica_of(mut self, master: &Redis) -> RedisBuilder {
        self.master = Some((master.addr(), master.password.clone()));
        self
    }

    /// Makes the server a node of a cluster, on a port that leaves room for the bus.
    pub fn cluster(mut self) -> RedisBuilder {
        self.cluster = true;
        self
    }

    /// Makes the server a sentinel, with these lines in its configuration besides those of its port.
    pub(crate) fn sentinel(mut self, lines: String) -> RedisBuilder {
        self.sentinel = Some(lines);
        self.binary("redis-sentinel")
    }

    /// Starts the server and waits until it answers.
    pub fn start(self) -> Redis {
        for _ in 0..ATTEMPTS {
            let redis = self.spawn();
            if redis.becomes_ready() {
                return redis;
            }
            let log = redis.log_tail();
            assert!(log.contains("already in use"), "the server does not start:\n{log}");
        }
        panic!("no port stays free");
    }

    fn spawn(&self) -> Redis {
        let dir = temp_dir();
        let tls = (self.listen == Listen::Tls).then(|| Certificates::make(dir.path()));
        let port = match self.listen {
            Listen::Unix => None,
            _ if self.cluster => Some(Port::free_for_cluster()),
            _ => Some(Port::free()),
        };
        let mut words: Vec<std::ffi::OsString> = Vec::new();
        if self.stepped {
            words.extend(clock::preload(dir.path()));
        }
        words.push(self.binary.clone().unwrap_or_else(|| "redis-server".into()).into());
        if let Some(lines) = &self.sentinel {
            // A file, for a sentinel keeps there what it has learnt.
            let port = port.as_ref().expect("a sentinel has a port").number();
            let lines = format!("bind 127.0.0.1\nport {port}\nunixsocket redis.sock\n{lines}");
            std::fs::write(dir.path().join("sentinel.conf"), lines).expect("the directory can be written");
            words.push("sentinel.conf".into());
        } else {
            words.extend(self.words(port.as_ref(), tls.as_ref()).into_iter().map(Into::into));
        }
        let process = Process::start(dir, words);
        Redis { process, port, tls, password: self.password.clone() }
    }

    fn words(&self, port: Option<&Port>, tls: Option<&Certificates>) -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        let mut set = |name: &str, values: &[&str]| {
            words.push(name.to_owned());
            words.extend(values.iter().map(|&value| value.to_owned()));
        };
        let port = port.map_or(0, Port::number).to_string();
        set("--bind", &["127.0.0.1"]);
        set("--unixsocket", &["redis.sock"]);
        set("--save", &[""]);
        set("--appendonly", &["no"]);
        set("--repl-diskless-sync-delay", &["0"]);
        if let Some(tls) = tls {
            set("--port", &["0"]);
            set("--tls-port", &[&port]);
            set("--tls-cert-file", &[&tls.server_cert().to_string_lossy()]);
            set("--tls-key-file", &[&tls.server_key().to_string_lossy()]);
            set("--tls-ca-cert-file", &[&tls.ca().to_string_lossy()]);
            set("--tls-auth-clients", &["optional"]);
        } else {
            set("--port", &[&port]);
        }
        if let Some(password) = &self.password {
            set("--requirepass", &[password]);
            set("--masterauth", &[password]);
        }
        if let Some((master, password)) = &self.master {
            set("--replicaof", &[&master.ip().to_string(), &master.port().to_string()]);
            if let Some(password) = password {
                set("--masterauth", &[password]);
            }
        }
        if self.cluster {
            set("--cluster-enabled", &["yes"]);
        }
        words.extend(self.args.iter().cloned());
        words
    }
}
