//! Whose a connection is: on one host, the kernel's tables tell which process has its other end.

use std::net::SocketAddr;

/// Whether a process has the socket that is connected from `client` to `here`.
pub(super) fn has(pid: u32, client: SocketAddr, here: SocketAddr) -> bool {
    let Some(inode) = inode(client, here) else { return false };
    let wanted = format!("socket:[{inode}]");
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|file| std::fs::read_link(file.path()).ok())
        .any(|link| link.as_os_str() == wanted.as_str())
}

/// The number of the socket, as `/proc` names it; none when it is closed already.
fn inode(client: SocketAddr, here: SocketAddr) -> Option<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux has it");
    let ends_with = |word: &str, addr: SocketAddr| word.ends_with(&format!(":{:04X}", addr.port()));
    table.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, remote, inode) = (words.get(1)?, words.get(2)?, words.get(9)?);
        (ends_with(local, client) && ends_with(remote, here)).then(|| (*inode).to_owned())
    })
}
