//! Every form of URL.

use super::*;

/// A lock taken through this URL is this key of this database.
async fn expect_key(redis: &Redis, url: &str, db: u32, prefix: &str) {
    let name = unique("url");
    let guard = lock(&connect(url).await, &name).await;
    let mut client = redis.client();
    client.call(&["SELECT", &db.to_string()]);
    let record = client.call(&["GET", &format!("{prefix}{name}")]);
    assert!(matches!(record, Reply::Text(text) if text.starts_with(&guard.claim_id().to_string())), "{url}");
    release(guard).await;
}

#[tokio::test]
async fn every_form_of_url_leads_to_its_server_database_and_key() {
    let (port, socket) = (SERVER.port(), SERVER.socket());
    let socket = socket.display();
    for (url, db, prefix) in [
        (format!("redis://:{SECRET}@127.0.0.1:{port}"), 0, "clinch:"),
        (format!("REDIS://ann:{SECRET}@localhost:{port}/"), 0, "clinch:"),
        (format!("redis://ann:{SECRET}@127.0.0.1:{port}/3?ttl=5s"), 3, "clinch:"),
        (format!("redis://:%68unter2@127.0.0.1:{port}/1?prefix=a%20b/"), 1, "a b/"),
        (format!("redis://:{SECRET}@127.0.0.1:{port}/2?prefix="), 2, ""),
        (format!("redis://:{SECRET}@127.0.0.1:{port}/4?protocol=resp2"), 4, "clinch:"),
        (format!("redis://:{SECRET}@127.0.0.1:{port}/5?lean=on"), 5, "clinch:"),
        (format!("redis://:{SECRET}@127.0.0.1:{port}?require=fencing,fifo,push"), 0, "clinch:"),
        (format!("redis+unix://:{SECRET}@{socket}"), 0, "clinch:"),
        (format!("redis+unix://ann:{SECRET}@{socket}?db=6&protocol=resp2"), 6, "clinch:"),
    ] {
        expect_key(&SERVER, &url, db, prefix).await;
    }
    let (port, ca) = (ENCRYPTED.port(), ENCRYPTED.certificates().ca());
    let ca = ca.display();
    for url in
        [format!("rediss://127.0.0.1:{port}/1?ca={ca}"), format!("rediss://localhost:{port}/1?ca={ca}")]
    {
        expect_key(&ENCRYPTED, &url, 1, "clinch:").await;
    }
}

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_ours() {
    let redis = Redis::builder().tls().arg("--tls-auth-clients", "yes").start();
    let tls = redis.certificates();
    let url =
        format!("{}&cert={}&key={}", redis.url(), tls.client_cert().display(), tls.client_key().display());
    expect_key(&redis, &url, 0, "clinch:").await;
    assert_eq!(refused(&redis.url()).await.kind(), ErrorKind::Unavailable);
    let half = refused(&format!("{}&cert={}", redis.url(), tls.client_cert().display())).await;
    assert_eq!(half.kind(), ErrorKind::Invalid, "{half:?}");
}
