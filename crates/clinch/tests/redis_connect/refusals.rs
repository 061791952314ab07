//! What is refused, with what is to be changed, and no secret.

use std::io::BufRead;
use std::process::{Child, Command, Stdio};

use super::*;

/// A real server that speaks HTTP.
struct Http(Child, u16);

impl Http {
    fn start() -> Http {
        let script = "import http.server as h
s=h.ThreadingHTTPServer(('127.0.0.1',0),h.SimpleHTTPRequestHandler)
print(s.server_address[1],flush=True)
s.serve_forever()";
        let mut python = Command::new("python3");
        let python = python.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = python.spawn().expect("these tests need python3");
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Http(child, line.trim().parse().unwrap())
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port at which nobody listens any more.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn every_refusal_says_what_to_change() {
    use ErrorKind::{Invalid, Refused, Unavailable, Unsupported};
    let (port, tls, free, http) = (SERVER.port(), ENCRYPTED.port(), free_port(), Http::start());
    let other = Redis::builder().tls().start();
    let (ca, other) = (ENCRYPTED.certificates().ca(), other.certificates().ca());
    let (ca, other) = (ca.display(), other.display());
    let login = format!(":{SECRET}@127.0.0.1:{port}");
    for (url, kind, words) in [
        (format!("redis://:x{login}"), Refused, "user and password in the URL"),
        (format!("redis://127.0.0.1:{port}"), Refused, "user and password in the URL"),
        (format!("redis://bob{login}"), Refused, "user and password in the URL"),
        (format!("redis://ann@127.0.0.1:{port}"), Refused, "user and password in the URL"),
        (format!("redis://{login}/99"), Invalid, "out of range"),
        (format!("redis://{login}/main"), Invalid, "a database of Redis is a number"),
        (format!("redis://:{SECRET}@127.0.0.1:{free}"), Unavailable, "Connection refused"),
        (format!("redis://:{SECRET}@nowhere.invalid"), Unavailable, "nowhere.invalid:6379"),
        ("redis+unix:///nowhere/redis.sock".to_owned(), Unavailable, "No such file"),
        (format!("redis://:{SECRET}@127.0.0.1:{}", http.1), Unavailable, "did not let us in"),
        (format!("redis://127.0.0.1:{}?protocol=resp2", http.1), Unavailable, "did not let us in"),
        (format!("rediss://127.0.0.1:{}?ca={ca}", http.1), Refused, "redis:// speaks without TLS"),
        (format!("rediss://127.0.0.1:{tls}?ca={other}"), Refused, "ca= names the authority"),
        (format!("rediss://127.0.0.1:{tls}"), Refused, "UnknownIssuer; ca= names the authority"),
        (format!("rediss://127.0.0.2:{tls}?ca={ca}"), Refused, "not valid for name"),
        (format!("rediss://127.0.0.1:{tls}?ca=/nowhere.pem"), Invalid, "/nowhere.pem cannot be used"),
        (format!("rediss://:{SECRET}@127.0.0.1:{port}?ca={ca}"), Unavailable, "did not answer"),
        (format!("redis://127.0.0.1:{tls}"), Unavailable, "did not let us in"),
        (format!("redis://{login}?ca={ca}"), Invalid, "are for rediss://"),
        (format!("redis://{login}?lien=on"), Invalid, "did you mean lean=?"),
        (format!("redis://{login}?perfix=x"), Invalid, "did you mean prefix=?"),
        (format!("redis://{login}?password={SECRET}"), Invalid, "it knows ca=, cert="),
        (format!("redis://{login}?lean=on&lean=on"), Invalid, "stands twice"),
        (format!("redis://{login}?protocol={SECRET}"), Invalid, "protocol= is one of"),
        (format!("redis://{login}?lean=on&require=fencing"), Unsupported, "\"fencing\""),
        (format!("redis+cluster://{login}"), Unsupported, "cluster support disabled"),
    ] {
        let error = clinch::connect(&url).await.expect_err(&url);
        assert_eq!(error.kind(), kind, "{url}: {error:?}");
        assert!(error.to_string().contains(words), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_password_is_never_shown() {
    let (port, free) = (SERVER.port(), free_port());
    for url in [
        format!("redis://:x{SECRET}@127.0.0.1:{port}"),
        format!("redis://bob:{SECRET}@127.0.0.1:{port}"),
        format!("redis://ann:{SECRET}@127.0.0.1:{port}/99"),
        format!("redis://ann:{SECRET}@127.0.0.1:{free}?password={SECRET}"),
        format!("redis://ann:{SECRET}@127.0.0.1:{free}"),
        format!("redis://ann:{SECRET}@127.0.0.1:{free}:1"),
        format!("redis://ann:{SECRET}%ff@127.0.0.1:{free}"),
        format!("redis://ann:{SECRET}@a,b"),
        format!("redis+sentinel://ann:{SECRET}@127.0.0.1:{free}/main?sentinel_password={SECRET}"),
        format!("rediss://ann:{SECRET}@127.0.0.1:{port}"),
    ] {
        refused(&url).await;
    }
    let redis = Redis::builder().password(SECRET).start();
    let locks = connect(&redis.url()).await;
    assert!(!format!("{locks:?} {:?}", locks.mutex("job").unwrap()).contains(SECRET));
    redis.kill();
    let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
}

/// As people write them: what should have been `%2F` or `%3F` ends the part of the URL in which secrets are expected.
#[tokio::test]
async fn a_password_that_should_have_been_escaped_is_not_shown_either() {
    for url in [
        format!("redis://:{SECRET}/x@127.0.0.1"),
        format!("redis://:x/{SECRET}@127.0.0.1"),
        format!("redis://:1/{SECRET}@127.0.0.1"),
        format!("redis://ann:1/{SECRET}@127.0.0.1"),
        format!("redis://ann:1?{SECRET}@127.0.0.1"),
        format!("redis://ann:{SECRET}?x@127.0.0.1"),
    ] {
        refused(&url).await;
    }
}

#[tokio::test]
async fn a_replica_is_refused() {
    let replica = Redis::builder().replica_of(&SERVER).password(SECRET).start();
    let error = refused(&replica.url()).await;
    assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
    assert!(error.to_string().contains("give the address of its master"), "{error}");
}

#[tokio::test]
async fn a_server_that_may_drop_locks_is_refused_unless_the_url_takes_the_risk() {
    for policy in ["allkeys-lru", "volatile-ttl"] {
        let redis = Redis::builder().arg("--maxmemory-policy", policy).start();
        // Without a limit nothing is dropped.
        release(lock(&connect(&redis.url()).await, "job").await).await;
        redis.call(&["CONFIG", "SET", "maxmemory", "100mb"]);
        let error = refused(&redis.url()).await;
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        let text = error.to_string();
        assert!(text.contains(policy) && text.contains("eviction=allow"), "{text}");
        release(lock(&connect(&format!("{}?eviction=allow", redis.url())).await, "job").await).await;
    }
}
