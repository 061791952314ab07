//! Takes the times of a number of lock-and-release pairs.

use hdrhistogram::Histogram;

use crate::Result;
use crate::harness::Sample;
use crate::machine::{cpu_time, now};
use crate::report::Metric;

/// Pairs before those that count, so that caches and branch predictors are warm.
const WARM_UP: u64 = 1_000;

pub(crate) const P50: Metric = Metric::new("p50", "µs");
pub(crate) const P99: Metric = Metric::new("p99", "µs");
pub(crate) const CPU: Metric = Metric::new("CPU", "µs per pair");

/// The times of a number of pairs.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    pub(crate) count: u64,
    times: Histogram<u64>,
}

impl Stopwatch {
    fn new(count: u64) -> Result<Stopwatch> {
        Ok(Stopwatch { count, times: Histogram::new(3)? })
    }

    pub(crate) fn each(&mut self, mut pair: impl FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..self.count {
            let start = now();
            pair()?;
            self.record(start)?;
        }
        Ok(())
    }

    /// Like [`Stopwatch::each`], in a runtime that is entered once, as in a program that runs in it.
    pub(crate) async fn each_async(&mut self, mut pair: impl AsyncFnMut() -> Result<()>) -> Result<()> {
        for _ in 0..self.count {
            let start = now();
            pair().await?;
            self.record(start)?;
        }
        Ok(())
    }

    fn record(&mut self, start: u64) -> Result<()> {
        Ok(self.times.record(now().saturating_sub(start))?)
    }
}

/// What `body` takes for a pair, after some that do not count.
pub(crate) fn measure(pairs: u64, mut body: impl FnMut(&mut Stopwatch) -> Result<()>) -> Result<Sample> {
    warm_up(pairs, &mut body)?;
    timed(pairs, body)
}

pub(crate) fn warm_up(pairs: u64, mut body: impl FnMut(&mut Stopwatch) -> Result<()>) -> Result<()> {
    body(&mut Stopwatch::new(WARM_UP.min(pairs))?)
}

pub(crate) fn timed(pairs: u64, mut body: impl FnMut(&mut Stopwatch) -> Result<()>) -> Result<Sample> {
    let mut time = Stopwatch::new(pairs)?;
    let used = cpu_time();
    body(&mut time)?;
    let used = cpu_time() - used;
    let micros = |nanos: u64| nanos as f64 / 1e3;
    Ok(vec![
        (P50, micros(time.times.value_at_quantile(0.5))),
        (P99, micros(time.times.value_at_quantile(0.99))),
        (CPU, micros(used) / pairs as f64),
    ])
}
