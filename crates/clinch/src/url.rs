//! Store URLs: `scheme[+variant]://[user:password@]host[,host]/path?key=value&...`.
//!
//! Parsed once, strictly: an unknown key is an error that names the nearest known one, and the password never shows.

mod scheme;

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;

#[cfg(test)]
pub(crate) use self::scheme::here;
#[cfg(all(test, feature = "redis"))]
pub(crate) use self::scheme::meant;
pub(crate) use self::scheme::no_store;
use crate::error::{Error, ErrorKind, Result};

/// What the name of each key has whose value is a secret, and of none else here. Parts of names, since a URL may be for another build.
const SECRETIVE: [&str; 6] = ["pass", "pwd", "secret", "token", "auth", "cred"];

/// A user, and a password if there is one.
pub(crate) type Credentials = (String, Option<String>);

/// A parsed store URL. A backend takes the keys it knows; what is left at [`StoreUrl::finish`] is refused.
pub(crate) struct StoreUrl {
    pub(crate) scheme: String,
    /// The hosts: what stands between `://`, or the `@` after user and password, and the path. Percent-decoded.
    pub(crate) authority: String,
    /// User and password, percent-decoded.
    credentials: Option<Credentials>,
    /// Percent-decoded.
    pub(crate) path: String,
    params: Vec<(String, String)>,
    /// Whether its path, keys and values may be parts of a secret whose characters were not escaped.
    spills: bool,
    /// Whether the path, as it stands in the URL, reads as one with a password in it.
    #[cfg(feature = "redis")]
    pub(crate) path_has_password: bool,
    /// The authority as it stands in the URL, for stores whose servers have users of their own.
    #[cfg(feature = "redis")]
    servers: String,
    known: Vec<&'static str>,
}

impl StoreUrl {
    pub(crate) fn parse(text: &str) -> Result<StoreUrl> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(scheme::missing(text));
        };
        // As a file with a secret in it ends: with that, it would be another directory or prefix, and other locks.
        if text.contains(|c: char| c.is_ascii_control()) || text.trim() != text {
            let message = "a line break or a blank at an end of the URL of the store; write %0A or %20 if it is part of a name";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        #[cfg(feature = "redis")]
        let servers = authority.to_owned();
        #[cfg(feature = "redis")]
        let path_has_password = path.rsplit_once('@').is_some_and(|(before, _)| before.contains(':'));
        let (credentials, authority) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, authority),
        };
        let credentials = credentials.map(credentials_in).transpose()?;
        let mut params = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            params.push((decode(key)?, decode(value)?));
        }
        let path = decode(path)?;
        let spills = path.contains('@')
            || params.iter().any(|(key, value)| is_secret(key) || key.contains('@') || value.contains('@'));
        Ok(StoreUrl {
            scheme: scheme.to_ascii_lowercase(),
            authority: decode(authority)?,
            path,
            credentials,
            params,
            spills,
            #[cfg(feature = "redis")]
            path_has_password,
            #[cfg(feature = "redis")]
            servers,
            known: Vec::new(),
        })
    }

    /// Takes the value of a key.
    pub(crate) fn take(&mut self, key: &'static str) -> Result<Option<String>> {
        self.known.push(key);
        let mut found = None;
        let mut twice = false;
        self.params.retain_mut(|(name, value)| {
            if name != key {
                return true;
            }
            twice |= found.replace(std::mem::take(value)).is_some();
            false
        });
        if twice { Err(Error::invalid(format!("{key}= stands twice in the store URL"))) } else { Ok(found) }
    }

    /// Refuses the URL of another store.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn expect(&self, schemes: &[&str]) -> Result<()> {
        if schemes.contains(&self.scheme.as_str()) { Ok(()) } else { Err(no_store(&self.scheme)) }
    }

    /// Takes the value of a key that is a secret, which [`holds_secret`] must know by its name.
    #[cfg(feature = "redis")]
    pub(crate) fn take_secret(&mut self, key: &'static str) -> Result<Option<String>> {
        debug_assert!(is_secret(key), "{key}= is not known to be a secret");
        self.take(key)
    }

    /// Takes the value of a key that is a duration like `500ms`, `30s` or `5m`.
    pub(crate) fn take_duration(&mut self, key: &'static str) -> Result<Option<Duration>> {
        let Some(text) = self.take(key)? else { return Ok(None) };
        // An M, which stands for months, is rarely meant so. The source would repeat a part of it.
        let parsed = humantime::parse_duration(&text).ok().filter(|_| !text.contains('M'));
        let duration = parsed.ok_or_else(|| {
            let text = self.shown(&text);
            Error::invalid(format!("{key}= takes a duration such as 500ms, 30s or 5m; \"{text}\" is none"))
        })?;
        Ok(Some(duration))
    }

    /// Takes a whole number.
    pub(crate) fn take_number(&mut self, key: &'static str) -> Result<Option<u32>> {
        let Some(text) = self.take(key)? else { return Ok(None) };
        let number = text.parse().map_err(|error| {
            let text = self.shown(&text);
            Error::invalid(format!("{key}= takes a whole number; \"{text}\" is none")).with_source(error)
        })?;
        Ok(Some(number))
    }

    /// Whether a password seems to have ended up elsewhere because it was not escaped.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn hides_credentials(&self) -> bool {
        let stray = |text: &str| text.contains('@');
        // Without hosts the path is one of files.
        !self.authority.is_empty() && stray(&self.path) || self.params.iter().any(|(key, _)| stray(key))
    }

    /// A value that makes no sense, as an error may show it.
    pub(crate) fn shown<'a>(&self, value: &'a str) -> &'a str {
        if self.spills { "(not shown)" } else { value }
    }

    /// Takes user and password.
    #[cfg(any(feature = "etcd", feature = "redis", test))]
    pub(crate) fn take_credentials(&mut self) -> Option<Credentials> {
        self.credentials.take()
    }

    /// Takes the servers, each with user and password of its own: `[user[:password]@]host[:port]` between commas.
    #[cfg(feature = "redis")]
    pub(crate) fn take_servers(&mut self) -> Result<Vec<(Option<Credentials>, String)>> {
        self.credentials = None;
        let server = |text: &str| match text.rsplit_once('@') {
            Some((credentials, host)) => Ok((Some(credentials_in(credentials)?), decode(host)?)),
            None => Ok((None, decode(text)?)),
        };
        self.servers.split(',').map(server).collect()
    }

    /// Refuses keys that nobody took, and credentials that nobody asked for.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if self.credentials.is_some() {
            return Err(Error::invalid(format!("{}:// takes no user and password", self.scheme)));
        }
        let Some((unknown, _)) = self.params.first() else { return Ok(()) };
        self.known.sort_unstable();
        if self.spills {
            return Err(Error::invalid(format!(
                "{}:// does not know a key that stands in its URL; it knows {}=; in a user, a password or a value, &, @, /, ?, # and : are \
                 written as %26, %40, %2F, %3F, %23 and %3A",
                self.scheme,
                self.known.join("=, ")
            )));
        }
        let nearest = self
            .known
            .iter()
            .map(|known| (strsim::damerau_levenshtein(unknown, known), known))
            .min()
            .filter(|(distance, _)| *distance <= 2)
            .map(|(_, known)| format!("; did you mean {known}=?"));
        let hint = nearest.unwrap_or_else(|| format!("; it knows {}=", self.known.join("=, ")));
        Err(Error::invalid(format!("{}:// does not know the key \"{unknown}\"{hint}", self.scheme)))
    }
}

/// Shows neither authority nor values: either may hold a secret.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://..", self.scheme)
    }
}

/// Whether a store URL holds a secret: a password before its hosts, or a key that is one. Rather once too often, since it may be the
/// URL of another build, or one whose password was not escaped.
///
/// # Examples
///
/// ```
/// assert!(clinch::holds_secret("redis+sentinel://s1,s2/main?sentinel_password=x"));
/// assert!(!clinch::holds_secret("redis://locks:6379/0?ttl=5s"));
/// ```
pub fn holds_secret(url: &str) -> bool {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    // No store of these has users, and a path may hold any character.
    let has_users = !["file", "memory"].contains(&scheme.to_ascii_lowercase().as_str());
    let (hosts, query) = rest.split_once('?').unwrap_or((rest, ""));
    let hosts = percent_decode_str(hosts).decode_utf8_lossy();
    let password = match hosts.rsplit_once('@') {
        Some((before, _)) => before.contains(':'),
        // One with a ? that was not escaped runs on to an @.
        None => query.contains('@') && hosts.contains(':') && !reads_as_hosts(&hosts),
    };
    let mut keys = query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(key, _)| key));
    has_users && password
        || keys.any(|key| {
            has_users && key.contains('@') || is_secret(&percent_decode_str(key).decode_utf8_lossy())
        })
}

/// Whether this is `host[:port],...[/path]`.
fn reads_as_hosts(text: &str) -> bool {
    let hosts = text.split_once('/').map_or(text, |(hosts, _)| hosts);
    hosts.split(',').all(|host| match host.rsplit_once(':') {
        Some((name, port)) => {
            let port = port.strip_suffix("+tls").unwrap_or(port);
            port.parse::<u16>().is_ok() && (name.starts_with('[') || !name.contains(':'))
        }
        None => true,
    })
}

fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRETIVE.iter().any(|part| key.contains(part))
}

/// Reads `user[:password]`.
fn credentials_in(text: &str) -> Result<Credentials> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    Ok((decode(user)?, (!password.is_empty()).then(|| decode(password)).transpose()?))
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`.
#[cfg(any(feature = "etcd", feature = "redis"))]
pub(crate) fn host_and_port(text: &str, default: u16) -> Result<(String, u16)> {
    let (host, rest) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':').unwrap_or(rest)),
        None => text.rsplit_once(':').unwrap_or((text, "")),
    };
    let port = if rest.is_empty() { Ok(default) } else { rest.parse() };
    let no_part = |c: char| c.is_whitespace() || c.is_control() || "@#[]".contains(c);
    let good = !host.is_empty() && !host.contains(no_part) && (text.starts_with('[') || !host.contains(':'));
    match port {
        Ok(port) if good => Ok((host.to_owned(), port)),
        // What stands there may be a part of a password.
        _ => Err(Error::invalid(
            "a server in the store URL is no host or host:port; in a user or password, /, ?, #, @, : and comma are written as %2F, %3F, \
             %23, %40, %3A and %2C, and the @ after it as it is",
        )),
    }
}

/// P11: in what could not be read, a password may stand anywhere. What comes after `://` and holds the secret "hunter2".
#[cfg(all(test, any(feature = "etcd", feature = "redis")))]
pub(crate) const UNREADABLE: [&str; 17] = [
    "me:hunter2%40host",
    "me:hunter2%40host:1",
    "hunter2%40host:1",
    ":hunter2",
    "me:hunter2?x=y@host",
    "me:p@ss/hunter2@host",
    "me:p@127.0.0.1:1/hunter2@host",
    "me:1/hunter2%40host",
    "me:p@ss?hunter2@host",
    "me:1?hunter2=x@host",
    "me:1?x=y&hunter2=z@host",
    "me:1?gap=hunter2@host",
    "me:p@ss?prefix=a&hunter2&x=y@host",
    "me:p?gap=5hunter2@host",
    "me:p@host?gap=hunter2&x=y@host",
    "host?sentinel_password=p&hunter2",
    "me:1?ca=hunter2@host",
];

fn decode(text: &str) -> Result<String> {
    match percent_decode_str(text).decode_utf8() {
        Ok(text) if !text.contains('\0') => Ok(text.into_owned()),
        _ => Err(Error::invalid("the store URL holds a percent escape that is no UTF-8 text")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a secret that `echo` has written ends: hosts that have one and hosts that have none would not exclude each other.
    #[test]
    fn a_line_break_makes_no_other_store() {
        for url in
            ["redis://h?prefix=a\n", "redis://h?prefix=a ", " redis://h", "file:///a\t/b", "etcd://h\r\n"]
        {
            let error = StoreUrl::parse(url).err().unwrap();
            assert!(
                error.kind() == ErrorKind::Invalid && error.to_string().contains("%20"),
                "{url:?}: {error}"
            );
        }
        StoreUrl::parse("file:///a dir%20/b%0A").unwrap();
    }

    #[test]
    fn a_url_comes_apart() {
        let mut url = StoreUrl::parse("file:///a%20dir/b?ttl=5s&x=1").unwrap();
        assert_eq!(
            (url.scheme.as_str(), url.authority.as_str(), url.path.as_str()),
            ("file", "", "/a dir/b")
        );
        assert_eq!(url.take_duration("ttl").unwrap(), Some(Duration::from_secs(5)));
        assert_eq!(url.take("x").unwrap().as_deref(), Some("1"));
        url.finish().unwrap();
    }

    #[test]
    fn an_unknown_key_names_the_nearest_known_one() {
        let mut url = StoreUrl::parse("file:///d?tll=5s").unwrap();
        url.take("ttl").unwrap();
        url.take("require").unwrap();
        let error = url.finish().unwrap_err().to_string();
        assert!(error.contains("\"tll\"") && error.contains("ttl=?"), "{error}");
    }

    #[test]
    fn nonsense_is_refused_and_secrets_stay_hidden() {
        for bad in ["", "nightly", "/var/lib", "file:///%ff", "file:///a%00b"] {
            assert!(StoreUrl::parse(bad).is_err(), "{bad}");
        }
        let mut url = StoreUrl::parse("redis://me:hunter2@h/0?ttl=1s&ttl=2s").unwrap();
        assert!(!format!("{url:?}").contains("hunter2"));
        assert!(url.take("ttl").is_err(), "a key that stands twice");
        assert_eq!(url.take_credentials(), Some(("me".into(), Some("hunter2".into()))));
        assert_eq!(url.authority, "h");
    }

    #[test]
    fn urls_with_secrets_are_known() {
        for secret in [
            "redis://u:p@h",
            "redis://:p@h/0?ttl=1s",
            "redlock://h1,u:p@h2,h3",
            "redis://u:p?s@h",
            "redis://u:1?s@h",
            "redis://u:p?x=s@h",
            "redis://u:p/s@h/0",
            "redis://u:p%40h",
            "etcd://h?password=x",
            "redis+sentinel://h/m?ttl=1s&sentinel_password=x",
            "redis+sentinel://h/m?Sentinel%5FPassword=x",
        ] {
            assert!(holds_secret(secret), "{secret}");
        }
        for open in [
            "file://",
            "redis://u@h",
            "redis://h:6379/0?prefix=a:",
            "redis://h:6379/0?prefix=team%40ops%3A",
            "redis://h:6379/0?prefix=team@ops:",
            "redlock://h1:1+tls,[::1]:2?prefix=team@ops:",
            "redis+unix:///run/redis@main.sock?prefix=a:@",
            "file:///a:b@c",
            "etcds://h:1?key=/k.pem",
        ] {
            assert!(!holds_secret(open), "{open}");
        }
    }

    #[test]
    fn credentials_may_hold_any_character_when_escaped() {
        let mut url = StoreUrl::parse("redis://a%40b:p%3Aq%2F%40@h:1,[::1]:2/3").unwrap();
        assert_eq!(url.take_credentials(), Some(("a@b".into(), Some("p:q/@".into()))));
        assert_eq!((url.authority.as_str(), url.path.as_str()), ("h:1,[::1]:2", "/3"));
        let error = StoreUrl::parse("file://me:secret@/d").unwrap().finish().unwrap_err().to_string();
        assert!(error.contains("no user") && !error.contains("secret"), "{error}");
    }
}
