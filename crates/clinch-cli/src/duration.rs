//! Durations as people type them: `500ms`, `5s`, `1h 30m`; plain numbers are seconds, as for `flock -w`.

use std::time::Duration;

use clinch::Guard;

/// Parses a duration, rounding up: what is shorter than a nanosecond is one, and never zero, which would mean something
/// else.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    if let Some(seconds) = plain_seconds(text) {
        return seconds;
    }
    let duration = humantime::parse_duration(text);
    if duration.is_ok() && text.contains('M') {
        let with = |unit| text.replace('M', unit);
        return Err(format!("M could be minutes or months: write {} or {}", with("m"), with("months")));
    }
    duration.map_err(|_| "a duration is a number of seconds, or one like 500ms, 5s, 2m or 1h".to_owned())
}

/// Parses for how long a lock is kept closed. Who asks for more would learn it after the job.
pub(crate) fn parse_closed(text: &str) -> Result<Duration, String> {
    let time = parse(text)?;
    if time.is_zero() {
        return Err("it must be longer than zero".to_owned());
    }
    if time > Guard::MAX_LINGER {
        return Err("a lock can be kept closed for ten years at most".to_owned());
    }
    Ok(time)
}

/// The shortest pause between two looks at a store: others need it, too.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// The longest one. Much more does not fit the clock.
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);

/// Parses a time to wait between two looks at a store.
pub(crate) fn parse_pause(text: &str) -> Result<Duration, String> {
    let pause = parse(text)?;
    if pause < SHORTEST_PAUSE {
        return Err("a store is asked every 100ms at most".to_owned());
    }
    if pause > LONGEST_PAUSE {
        return Err("a store is asked once a day at least".to_owned());
    }
    Ok(pause)
}

/// `None`: not a plain number.
fn plain_seconds(text: &str) -> Option<Result<Duration, String>> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    let too_long = || format!("{text} seconds are too many");
    let seconds = if whole.is_empty() { Ok(0) } else { whole.parse::<u64>() };
    let Ok(seconds) = seconds else { return Some(Err(too_long())) };
    let nanos: String = fraction.chars().chain(std::iter::repeat('0')).take(9).collect();
    let nanos = nanos.parse::<u64>().unwrap_or(0);
    let rest = fraction.chars().skip(9).any(|digit| digit != '0');
    let fraction = Duration::from_nanos(nanos + u64::from(rest));
    Some(Duration::from_secs(seconds).checked_add(fraction).ok_or_else(too_long))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_numbers_are_seconds_and_nothing_positive_becomes_zero() {
        for (text, nanos) in [
            ("0", 0),
            ("5", 5_000_000_000),
            ("0.25", 250_000_000),
            (".5", 500_000_000),
            ("1.", 1_000_000_000),
            ("0.0000000001", 1),
            ("500ms", 500_000_000),
            ("1h 30m", 5_400_000_000_000),
        ] {
            assert_eq!(parse(text).unwrap().as_nanos(), nanos, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in ["", ".", "-1", "1e3", "soon", "5 parsecs", "99999999999999999999", "inf", "5M"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("1h 5M").unwrap_err(), "M could be minutes or months: write 1h 5m or 1h 5months");
        assert_eq!(parse("5months").unwrap().as_secs(), 5 * 2_630_016);
    }
}
