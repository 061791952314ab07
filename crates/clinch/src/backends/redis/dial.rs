//! Opening connections: TCP, Unix socket, TLS, login, protocol version, and the master that Sentinel names.

use std::sync::Arc;
use std::time::Duration;

use super::check::Server;
use super::failure::{Failure, meaning};
use super::link::Link;
use super::resp::Command;
use super::sentinel::{Sentinel, expect_master};
use super::settings::{Address, Credentials, Settings};
use super::wire::Pushes;
use crate::backends::tls;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::net::Stream;

/// How long opening a connection may take, login included.
const PATIENCE: Duration = Duration::from_secs(2);

/// The name by which `CLIENT LIST` shows our connections.
const CLIENT_NAME: &str = "clinch";

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

impl Dialer {
    /// Opens a connection. Must run inside a tokio runtime, which then drives it. In protocol 3, when the server speaks
    /// it and nobody asked for the older one; says whether it is.
    pub(super) async fn open(&self, endpoint: &Endpoint, pushes: Option<Pushes>) -> Result<(Link, Protocol)> {
        let address = self.locate(endpoint).await?;
        let login = self.login(&address, pushes);
        let (link, protocol) = self.limited(&address, login).await?;
        if let Endpoint::Master(sentinel) = endpoint {
            expect_master(&link).await?;
            sentinel.expect_latest(&link)?;
        }
        Ok((link, protocol))
    }

    /// The server that an endpoint stands for at this moment.
    pub(super) async fn locate(&self, endpoint: &Endpoint) -> Result<Address> {
        match endpoint {
            Endpoint::At(address) => Ok(address.clone()),
            Endpoint::Master(sentinel) => sentinel.locate(self).await,
        }
    }

    /// A stream to a server.
    pub(super) async fn stream(&self, address: &Address) -> Result<Box<dyn Stream>> {
        self.encrypted(self.reach(address).await?, address).await
    }

    /// A stream to a server, as it is.
    pub(super) async fn reach(&self, address: &Address) -> Result<Box<dyn Stream>> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, format!("no connection to {address}: {error}"))
                .with_source(error)
        };
        let connector = self.env.connector();
        match address {
            Address::Unix(path) => connector.connect_unix(path).await.map_err(failed),
            Address::Tcp(host, port) => connector.connect(host, *port).await.map_err(failed),
        }
    }

    /// The same stream with TLS, where that is asked for.
    pub(super) async fn encrypted(
        &self,
        stream: Box<dyn Stream>,
        address: &Address,
    ) -> Result<Box<dyn Stream>> {
        match (address, &self.settings.tls) {
            (Address::Tcp(host, _), Some(config)) => {
                tls::over(stream, config, host, self.settings.schemes.plain).await
            }
            _ => Ok(stream),
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
            () = self.env.sleep_until(self.env.now() + PATIENCE) => {
                let late = format!("{address} did not answer within {PATIENCE:?}");
                let error = Error::new(ErrorKind::Unavailable, late);
                Err(if self.settings.tls.is_some() { error.with_remedy("does it speak TLS?") } else { error })
            }
        }
    }

    /// Opens a connection for steps, to a server that was found fit to keep locks.
    pub(super) async fn open_for_steps(&self, endpoint: &Endpoint) -> Result<Link> {
        let (mut link, _) = self.open(endpoint, None).await?;
        let about = match link.call(&Command::new("INFO")).await {
            Ok(info) => Server::read(info.text().unwrap_or_default()),
            // A user who may not look is believed to know.
            Err(failure) if failure.code() == "NOPERM" => Server::default(),
            Err(failure) => return Err(failure.into_error(link.server())),
        };
        about.refuse_unfit(self.settings.eviction_allowed)?;
        link.about = about;
        Ok(link)
    }

    async fn login(&self, address: &Address, pushes: Option<Pushes>) -> Result<(Link, Protocol)> {
        self.login_over(self.stream(address).await?, address, pushes).await
    }

    /// Logs in over a stream.
    pub(super) async fn login_over(
        &self,
        stream: Box<dyn Stream>,
        address: &Address,
        pushes: Option<Pushes>,
    ) -> Result<(Link, Protocol)> {
        let Settings { credentials, db, resp2, .. } = &self.settings;
        let link = Link::new(stream, pushes, address, self.env.clone());
        let mut protocol = if *resp2 { Protocol::Two } else { Protocol::Three };
        let said = match protocol {
            Protocol::Two => authenticate(&link, credentials).await,
            Protocol::Three => match link.call(&hello(credentials)).await {
                // A server from before version 6 does not know HELLO; one that restricts users may not allow it.
                Err(failure) if says_no_to_hello(&failure) => {
                    protocol = Protocol::Two;
                    authenticate(&link, credentials).await
                }
                answer => answer.map(drop),
            },
        };
        let selected = async {
            said?;
            if *db > 0 {
                link.call(Command::new("SELECT").arg(*db)).await?;
            }
            Ok(())
        };
        selected.await.map_err(|failure| cannot_log_in(address, failure))?;
        Ok((link, protocol))
    }
}

/// What a server and we speak on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Two,
    /// The server may tell of changed keys.
    Three,
}

fn hello(credentials: &Credentials) -> Command {
    let mut hello = Command::new("HELLO");
    hello.arg(3);
    if credentials.are_given() {
        let user = credentials.user.as_deref().unwrap_or("default");
        hello.arg("AUTH").arg(user).arg(credentials.password.as_deref().unwrap_or_default());
    }
    hello.arg("SETNAME").arg(CLIENT_NAME);
    hello
}

/// Says who we are, in protocol 2.
pub(super) async fn authenticate(link: &Link, credentials: &Credentials) -> Result<(), Failure> {
    if !credentials.are_given() {
        // Whether it is a Redis at all. Who may not ask that is answered too.
        return match link.call(&Command::new("PING")).await {
            Err(cut @ Failure::Cut { .. }) => Err(cut),
            _ => Ok(()),
        };
    }
    let mut auth = Command::new("AUTH");
    if let Some(user) = &credentials.user {
        auth.arg(user);
    }
    auth.arg(credentials.password.as_deref().unwrap_or_default());
    link.call(&auth).await.map(drop)
}

fn says_no_to_hello(failure: &Failure) -> bool {
    match failure {
        Failure::Server { code, detail } => match code.as_str() {
            "NOPROTO" => true,
            "ERR" | "NOPERM" => detail.to_ascii_lowercase().contains("hello"),
            _ => false,
        },
        Failure::Cut { .. } => false,
    }
}

pub(super) fn cannot_log_in(address: &Address, failure: Failure) -> Error {
    let (kind, why, advice) = match failure {
        Failure::Cut { why, .. } => (ErrorKind::Unavailable, why, ""),
        Failure::Server { code, detail } => {
            let of_login = matches!(code.as_str(), "WRONGPASS" | "NOAUTH" | "NOPERM")
                || code == "ERR" && (detail.contains("AUTH") || detail.contains("password"));
            let (kind, advice) = match meaning(&code) {
                _ if of_login => (ErrorKind::Refused, "; look at user and password in the URL"),
                Some(meaning) => meaning,
                None if code == "ERR" => (ErrorKind::Invalid, ""),
                None => (ErrorKind::Unavailable, ""),
            };
            (kind, format!("{code} {detail}"), advice)
        }
    };
    Error::new(kind, format!("{address} did not let us in: {why}"))
        .with_remedy(advice.trim_start_matches("; "))
}
