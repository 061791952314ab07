//! Opening connections: TCP, Unix socket, TLS, login, protocol version, and the master that Sentinel names.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo, Value};

use super::failure::Failure;
use super::link::Link;
use super::settings::{Address, Credentials, SCHEMES, Sentinel, Settings};
use crate::backends::tls;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::net::Stream;

/// How long opening a connection may take, login included.
const PATIENCE: Duration = Duration::from_secs(2);

/// Commands that may wait in a connection before their senders do.
const QUEUED_COMMANDS: usize = 256;

/// Where a connection leads.
#[derive(Clone)]
pub(super) enum Endpoint {
    /// One server.
    At(Address),
    /// Whatever server the sentinels call the master when the connection is opened.
    Master(Arc<Sentinel>),
}

/// Opens connections to the servers of one URL.
pub(super) struct Dialer {
    pub(super) env: Env,
    pub(super) settings: Settings,
}

/// What a connection does with messages that are no answers.
pub(super) type Pushes = Option<Box<dyn Fn(redis::PushInfo) + Send + Sync>>;

impl Dialer {
    /// Opens a connection that answers commands. Must run inside a tokio runtime, which then drives the connection.
    pub(super) async fn open(&self, endpoint: &Endpoint, pushes: Pushes) -> Result<Link> {
        let address = self.locate(endpoint).await?;
        let resp3 = !self.settings.resp2;
        let link =
            self.limited(&address, self.login(&address, &self.settings.credentials, resp3, pushes)).await?;
        if matches!(endpoint, Endpoint::Master(_)) {
            self.expect_master(&link).await?;
        }
        Ok(link)
    }

    /// The server that an endpoint stands for at this moment.
    pub(super) async fn locate(&self, endpoint: &Endpoint) -> Result<Address> {
        match endpoint {
            Endpoint::At(address) => Ok(address.clone()),
            Endpoint::Master(sentinel) => self.ask_sentinels(sentinel).await,
        }
    }

    /// A stream to a server.
    pub(super) async fn stream(&self, address: &Address) -> Result<Box<dyn Stream>> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, format!("no connection to {address}: {error}"))
                .with_source(error)
        };
        let connector = self.env.connector();
        match address {
            Address::Unix(path) => connector.connect_unix(path).await.map_err(failed),
            Address::Tcp(host, port) => {
                let stream = connector.connect(host, *port).await.map_err(failed)?;
                match &self.settings.tls {
                    Some(config) => tls::over(stream, config, host, SCHEMES.plain).await,
                    None => Ok(stream),
                }
            }
        }
    }

    /// Gives up on a step of opening that takes too long.
    pub(super) async fn limited<T>(
        &self,
        address: &Address,
        step: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            opened = step => opened,
            () = self.env.sleep_until(self.env.now() + PATIENCE) => Err(Error::new(
                ErrorKind::Unavailable,
                format!("{address} did not answer within {PATIENCE:?}"),
            )),
        }
    }

    /// Who we are and how we speak, for a connection.
    pub(super) fn introduction(
        &self,
        credentials: &Credentials,
        resp3: bool,
        db: i64,
    ) -> RedisConnectionInfo {
        let protocol = if resp3 { ProtocolVersion::RESP3 } else { ProtocolVersion::RESP2 };
        let mut info = RedisConnectionInfo::default()
            .set_db(db)
            .set_protocol(protocol)
            .set_lib_name("clinch", env!("CARGO_PKG_VERSION"));
        if let Some(user) = &credentials.user {
            info = info.set_username(user);
        }
        if let Some(password) = &credentials.password {
            info = info.set_password(password);
        }
        info
    }

    async fn login(
        &self,
        address: &Address,
        credentials: &Credentials,
        resp3: bool,
        pushes: Pushes,
    ) -> Result<Link> {
        let mut config =
            AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(QUEUED_COMMANDS);
        let wants_pushes = pushes.is_some();
        if let (Some(pushes), true) = (pushes, resp3) {
            config = config.set_push_sender(move |info| {
                pushes(info);
                Ok::<(), redis::aio::SendError>(())
            });
        }
        let info = self.introduction(credentials, resp3, self.settings.db);
        let stream = self.stream(address).await?;
        let refused = match MultiplexedConnection::new_with_config(&info, stream, config).await {
            Ok((connection, driver)) => return Ok(Link::new(connection, driver, address, self.env.clone())),
            Err(refused) => refused,
        };
        // A server from before version 6 does not know HELLO; one that restricts users may not allow it.
        if resp3 && !wants_pushes && says_no_to_hello(&refused) {
            return Box::pin(self.login(address, credentials, false, None)).await;
        }
        Err(cannot_log_in(address, refused))
    }

    /// Refuses a server that is no longer what Sentinel said.
    async fn expect_master(&self, link: &Link) -> Result<()> {
        match link.call(&redis::cmd("ROLE")).await {
            Ok(Value::Array(role)) if role.first().and_then(text).is_some_and(|role| role != "master") => {
                link.life().close();
                Err(Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "Sentinel named {} as the master, which says that it is none; a failover is under way",
                        link.server()
                    ),
                ))
            }
            // Where ROLE is not allowed, the first write tells.
            Ok(_) | Err(Failure::Server { .. }) => Ok(()),
            Err(cut) => Err(cut.into_error(link.server())),
        }
    }

    /// Asks all sentinels at once for the master; the first that knows decides.
    async fn ask_sentinels(&self, sentinel: &Arc<Sentinel>) -> Result<Address> {
        let asked = sentinel
            .sentinels
            .iter()
            .map(|address| Box::pin(self.limited(address, self.ask_sentinel(address, sentinel))));
        match futures_util::future::select_ok(asked).await {
            Ok((address, _)) => Ok(address),
            Err(error) => Err(error),
        }
    }

    async fn ask_sentinel(&self, address: &Address, sentinel: &Sentinel) -> Result<Address> {
        let info = self.introduction(&sentinel.credentials, false, 0);
        let stream = self.stream(address).await?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&info, stream, config).await;
        let (connection, driver) = opened.map_err(|error| cannot_log_in(address, error))?;
        let link = Link::new(connection, driver, address, self.env.clone());
        let mut command = redis::cmd("SENTINEL");
        command.arg("get-master-addr-by-name").arg(&sentinel.master);
        let answer = link.call(&command).await.map_err(|failure| failure.into_error(link.server()));
        link.life().close();
        let Value::Array(parts) = answer? else {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the sentinel at {address} knows no master \"{}\"; look at SENTINEL MASTERS",
                    sentinel.master
                ),
            ));
        };
        let parts: Vec<&str> = parts.iter().filter_map(text).collect();
        match parts[..] {
            [host, port] => match port.parse() {
                Ok(port) => Ok(Address::Tcp(host.to_owned(), port)),
                Err(_) => Err(nonsense(address)),
            },
            _ => Err(nonsense(address)),
        }
    }
}

fn nonsense(address: &Address) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the sentinel at {address} gave no address of the master"))
}

/// Text out of an answer.
pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

fn says_no_to_hello(error: &redis::RedisError) -> bool {
    let text = error.to_string().to_ascii_lowercase();
    text.contains("hello") || text.contains("noproto") || text.contains("resp3")
}

fn cannot_log_in(address: &Address, error: redis::RedisError) -> Error {
    let text = error.to_string();
    let refused = ["WRONGPASS", "NOAUTH", "NOPERM", "uthentication"].iter().any(|word| text.contains(word))
        || error.kind() == redis::ErrorKind::AuthenticationFailed;
    let (kind, advice) = match refused {
        true => (ErrorKind::Refused, "; look at user and password in the URL"),
        false if matches!(error.code(), Some("ERR")) => (ErrorKind::Invalid, ""),
        false => (ErrorKind::Unavailable, ""),
    };
    Error::new(kind, format!("{address} did not let us in: {text}{advice}")).with_source(error)
}
