use crate::Redis;

/// Leaves on these servers what clients of a `redlock://` URL with `durable=on` would have left had they used the servers for
/// long, so that all vote at once and a test need not wait for `max_ttl=`. What stands there already stays. Servers that cannot
/// be written to are left out.
pub fn vouch<'a>(url: &str, servers: impl IntoIterator<Item = &'a Redis>) {
    let (hosts, query) = url.split_once("://").unwrap().1.split_once('?').unwrap();
    let mut hosts: Vec<&str> = hosts.split(',').map(address).collect();
    hosts.sort_unstable();
    let value = |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
    let terms = format!(
        "{}?prefix={}&max_ttl={}us&drift={}&durable=on&fencing={} ",
        hosts.join(","),
        value("prefix").unwrap_or("clinch:"),
        micros(value("max_ttl").unwrap_or("30s")),
        value("drift").unwrap_or("10"),
        value("fencing").unwrap_or("on"),
    );
    // The clocks of all have been equal since 1970. The run is none: its tokens have yet to be told.
    let witnesses: String = hosts.iter().map(|host| format!(" {host}=0,0,0,0")).collect();
    let (key, word) =
        (format!("clinch:~{{voucher}}:{:016x}", hash(&terms)), format!("{terms}- 0{witnesses}"));
    for server in servers {
        server.ask(&["SET", &key, &word, "NX"]);
    }
}

/// A server of a URL, without its user and password and how it is spoken to.
fn address(server: &str) -> &str {
    server.rsplit('@').next().unwrap().trim_end_matches("+tls")
}

fn micros(time: &str) -> u64 {
    let unit = time.trim_start_matches(|digit: char| digit.is_ascii_digit());
    let in_micros = match unit {
        "ms" => 1000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        _ => panic!("{time} is no time"),
    };
    time.trim_end_matches(unit).parse::<u64>().unwrap() * in_micros
}

/// FNV-1a, as the library counts it.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
