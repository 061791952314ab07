//! Times hand-offs among tasks or as one process of many.
use std::time::{Duration, Instant};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (dir, w, hold_us, secs): (String, usize, u64, u64) =
        (args[1].clone(), args[2].parse().unwrap(), args[3].parse().unwrap(), args[4].parse().unwrap());
    let rt = if w == 1 {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    } else {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    };
    rt.block_on(async {
        let locks = clinch::connect(&format!("file://{dir}")).await.unwrap();
        let end = Instant::now() + Duration::from_secs(secs);
        let mut tasks = vec![];
        for _ in 0..w {
            let m = locks.mutex("h").unwrap();
            tasks.push(tokio::spawn(async move {
                let mut n = 0u64;
                while Instant::now() < end {
                    let g = m.lock().await.unwrap();
                    if hold_us > 0 {
                        std::thread::sleep(Duration::from_micros(hold_us));
                    }
                    n += 1;
                    g.release().await.unwrap();
                }
                n
            }));
        }
        let mut all = vec![];
        for t in tasks {
            all.push(t.await.unwrap());
        }
        let sum: u64 = all.iter().sum();
        let sq: f64 = all.iter().map(|n| (*n as f64).powi(2)).sum();
        println!(
            "{} /s total {} min {} max {} jain {:.4}",
            sum / secs,
            sum,
            all.iter().min().unwrap(),
            all.iter().max().unwrap(),
            (sum as f64).powi(2) / (sq * all.len() as f64)
        );
    });
}
