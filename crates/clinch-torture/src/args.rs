//! The command line.

use std::time::Duration;

use crate::stage::STORES;

pub(crate) const USAGE: &str = "\
Usage: clinch-torture [STORE...] [--seed N] [--for TIME] [--workers N] [--tasks N] [--round TIME] [--keep]

Random work and random faults on real servers and processes, judged by the checker.

  STORE         memory, file, redis, sentinel, cluster, redlock, etcd; all, side by side, unless some are named
  --seed N      throws the same dice again; what is under way at what time is another matter
  --for TIME    how long: 90s, 10m, 1h [1m]
  --workers N   processes on each store [3]
  --tasks N     tasks in each [20]
  --round TIME  how long work goes on before all is let go and judged [2m]
  --keep        keeps the histories, also of what was found right";

/// What was asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Args {
    pub(crate) stores: Vec<String>,
    pub(crate) seed: u64,
    pub(crate) time: Duration,
    pub(crate) workers: usize,
    pub(crate) tasks: u64,
    pub(crate) round: Duration,
    pub(crate) keep: bool,
}

pub(crate) fn parse(words: &[String], seed: u64) -> Result<Args, String> {
    let mut args = Args {
        stores: Vec::new(),
        seed,
        time: Duration::from_secs(60),
        workers: 3,
        tasks: 20,
        round: Duration::from_secs(120),
        keep: false,
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--seed" => args.seed = number(value()?)?,
            "--for" => args.time = time(value()?)?,
            "--workers" => args.workers = usize::try_from(number(value()?)?.max(1)).unwrap_or(1),
            "--tasks" => args.tasks = number(value()?)?.max(1),
            "--round" => args.round = time(value()?)?,
            "--keep" => args.keep = true,
            store if STORES.contains(&store) => args.stores.push(store.to_owned()),
            other => return Err(format!("\"{other}\" is neither a store nor an option\n\n{USAGE}")),
        }
    }
    if args.stores.is_empty() {
        args.stores = STORES.iter().map(|&store| store.to_owned()).collect();
    }
    Ok(args)
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("\"{text}\" is no whole number"))
}

fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
    let seconds = match text.get(digits.len()..) {
        Some("s") => 1,
        Some("m") => 60,
        Some("h") => 3600,
        _ => return Err(format!("\"{text}\" is no time, such as 90s, 10m, 1h")),
    };
    let time = number(digits)?.saturating_mul(seconds);
    if time == 0 { Err("no time is too short".to_owned()) } else { Ok(Duration::from_secs(time)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_line_is_understood_or_refused() {
        let args = parse(&words("redis --seed 7 --for 10m --workers 5"), 1).unwrap();
        assert_eq!((args.seed, args.time, args.workers), (7, Duration::from_secs(600), 5));
        assert_eq!(args.stores, ["redis"]);
        assert_eq!(parse(&[], 1).unwrap().stores.len(), STORES.len());
        for bad in ["paper", "--for", "--for 10", "--for 0s", "--seed x"] {
            assert!(parse(&words(bad), 1).is_err(), "{bad}");
        }
    }
}
