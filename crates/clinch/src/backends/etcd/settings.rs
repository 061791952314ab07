//! What an `etcd` URL says.

use std::sync::Arc;

use crate::backends::tls;
use crate::error::{Error, Result};
use crate::url::{StoreUrl, host_and_port};

/// The two ways to speak, as errors name them.
pub(super) const SCHEMES: tls::Schemes = tls::Schemes { plain: "etcd://", encrypted: "etcds://" };

/// Where etcd listens for clients unless told otherwise.
const PORT: u16 = 2379;

/// Where keys begin unless the URL says another.
const PREFIX: &str = "/clinch/";

/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 128;

/// A parsed URL. `Debug` is left out on purpose: it holds the password.
pub(super) struct Settings {
    pub(super) endpoints: Vec<Address>,
    /// User and password.
    pub(super) credentials: Option<(String, String)>,
    pub(super) tls: Option<Arc<rustls::ClientConfig>>,
    pub(super) prefix: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Address { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl Settings {
    pub(super) fn parse(url: &mut StoreUrl) -> Result<Settings> {
        url.expect(&["etcd", "etcds"])?;
        if url.hides_credentials() {
            return Err(Error::invalid(
                "in a store URL, /, ?, #, @ and : of a user or password are written as %2F, %3F, %23, %40 and %3A",
            ));
        }
        let mut tls = tls::config(url, SCHEMES, url.scheme == "etcds")?;
        if let Some(config) = &mut tls {
            // gRPC servers refuse a connection that has not agreed on HTTP/2.
            Arc::make_mut(config).alpn_protocols = vec![b"h2".to_vec()];
        }
        let credentials = match url.take_credentials() {
            None => None,
            Some((user, Some(password))) if !user.is_empty() => Some((user, password)),
            Some(_) => {
                return Err(Error::invalid(
                    "etcd knows users by name and password: write etcd://user:password@host",
                ));
            }
        };
        if !url.path.trim_matches('/').is_empty() {
            return Err(Error::invalid(
                "etcd has no databases: leave the path away; where keys begin is said by prefix=",
            ));
        }
        let prefix = url.take("prefix")?.unwrap_or_else(|| PREFIX.to_owned());
        if prefix.len() > MAX_PREFIX {
            return Err(Error::invalid(format!("prefix= may have at most {MAX_PREFIX} bytes")));
        }
        Ok(Settings { endpoints: addresses(&url.authority)?, credentials, tls, prefix })
    }
}

/// `host`, `host:port`, `[v6]` and `[v6]:port`, between commas.
fn addresses(authority: &str) -> Result<Vec<Address>> {
    let hosts = if authority.is_empty() { "127.0.0.1" } else { authority };
    let address = |text| host_and_port(text, PORT).map(|(host, port)| Address { host, port });
    hosts.split(',').map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings> {
        let mut url = StoreUrl::parse(text)?;
        let settings = Settings::parse(&mut url)?;
        url.finish()?;
        Ok(settings)
    }

    #[test]
    fn no_secret_is_repeated() {
        for rest in crate::url::UNREADABLE {
            for scheme in ["etcd", "etcds"] {
                let error = parse(&format!("{scheme}://{rest}")).err().unwrap().to_string();
                assert!(!error.contains("hunter2"), "{scheme}://{rest}: {error}");
            }
        }
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let settings = parse("etcd://me:p%40w@a,b:1,[::1]:2/?prefix=locks/").unwrap();
        let at = |host: &str, port| Address { host: host.into(), port };
        assert_eq!(settings.endpoints, [at("a", 2379), at("b", 1), at("::1", 2)]);
        assert_eq!(settings.credentials, Some(("me".into(), "p@w".into())));
        assert_eq!((settings.prefix.as_str(), settings.tls.is_none()), ("locks/", true));
        let bare = parse("etcds://").unwrap();
        assert_eq!((bare.endpoints, bare.prefix.as_str()), (vec![at("127.0.0.1", 2379)], "/clinch/"));
        assert_eq!(bare.tls.unwrap().alpn_protocols, [b"h2"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for bad in [
            "etcd://h/path",
            "etcd://h:port",
            "etcd://,",
            "etcd://::1",
            "etcd://a b",
            "etcd://me@h",
            "etcd://:pw@h",
            "etcd://h?prefx=a",
            "etcd://h?ca=/x.pem",
            "etcds://h?ca=/there/is/none.pem",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
