#![allow(missing_docs)]
use std::time::{Duration, Instant};
#[tokio::test]
async fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}", dir.path().display());
    let locks = clinch::connect(&url).await.unwrap();
    let m = locks.mutex("a").unwrap();
    let g = m.lock().await.unwrap();
    assert!(m.try_lock().await.unwrap().is_none());
    let m2 = m.clone();
    let w = tokio::spawn(async move { m2.lock().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(100)).await;
    println!("{:#?}", locks.list("").await.unwrap());
    let t = g.token();
    let s = Instant::now();
    drop(g);
    let g = w.await.unwrap();
    println!("handoff {:?}", s.elapsed());
    assert!(g.token() > t);
    drop(g);
    let n = 20000;
    for _ in 0..3 {
        let s = Instant::now();
        for _ in 0..n {
            m.lock().await.unwrap().release().await.unwrap();
        }
        println!("pair {:?}", s.elapsed() / n);
        let s = Instant::now();
        for _ in 0..n {
            drop(m.try_lock().await.unwrap().unwrap());
        }
        println!("try+drop {:?}", s.elapsed() / n);
    }
    println!("{}", std::fs::read_to_string(dir.path().join("a.lock")).unwrap().replace('\0', ""));
}
