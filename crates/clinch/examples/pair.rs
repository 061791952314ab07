//! Times uncontended pairs.
fn main() {
    let dir = tempfile::tempdir().unwrap();
    let n: u32 = std::env::args().nth(1).map_or(50000, |n| n.parse().unwrap());
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let locks = clinch::connect(&format!("file://{}", dir.path().display())).await.unwrap();
        let m = locks.mutex("a").unwrap();
        let s = std::time::Instant::now();
        for _ in 0..n {
            m.lock().await.unwrap().release().await.unwrap();
        }
        println!("pair {:?}", s.elapsed() / n);
    });
}
