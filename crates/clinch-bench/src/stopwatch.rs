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
pub(crate) const TAKE_P50: Metric = Metric::new("acquire p50", "µs");
pub(crate) const FREE_P50: Metric = Metric::new("release p50", "µs");
pub(crate) const CPU: Metric = Metric::new("CPU", "µs per pair");

/// The times of a number of pairs.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    pub(crate) count: u64,
    times: Histogram<u64>,
    /// The times of the halves, where they are told apart.
    takes: Histogram<u64>,
    frees: Histogram<u64>,
}

impl Stopwatch {
    fn new(count: u64) -> Result<Stopwatch> {
        let histogram = || Histogram::new(3);
        Ok(Stopwatch { count, times: histogram()?, takes: histogram()?, frees: histogram()? })
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

    /// Notes a pair that ends now: when it began, and when the lock was taken.
    pub(crate) fn halves(&mut self, start: u64, taken: u64) -> Result<()> {
        let end = now();
        self.times.record(end.saturating_sub(start))?;
        self.takes.record(taken.saturating_sub(start))?;
        Ok(self.frees.record(end.saturating_sub(taken))?)
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
    let mut sample = vec![
        (P50, micros(time.times.value_at_quantile(0.5))),
        (P99, micros(time.times.value_at_quantile(0.99))),
    ];
    if !time.takes.is_empty() {
        sample.push((TAKE_P50, micros(time.takes.value_at_quantile(0.5))));
        sample.push((FREE_P50, micros(time.frees.value_at_quantile(0.5))));
    }
    sample.push((CPU, micros(used) / pairs as f64));
    Ok(sample)
}
