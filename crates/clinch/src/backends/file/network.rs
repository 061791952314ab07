//! Network file systems, whose locks or change events do not reach other hosts.

use std::path::Path;

use crate::error::{Error, ErrorKind, Result};

/// By the magic number of `statfs(2)`. Which are shared by hosts is what `tail` of GNU coreutils knows (`stat.c`).
const NETWORK_FILE_SYSTEMS: [(u32, &str); 25] = [
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xfe53_4d42, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x0bd0_0bd0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x2003_0528, "OrangeFS"),
    (0x7375_7245, "Coda"),
    (0x786f_4256, "VirtualBox's shared folder"),
    (0xbacb_acbc, "VMware's shared folder"),
    (0x7c7c_6673, "Parallels' shared folder"),
    (0x0000_564c, "NCP"),
    (0x6163_6673, "ACFS"),
    (0xaad7_aaea, "PanFS"),
    (0xbeef_dead, "StorNext"),
    (0x0131_11a8, "IBRIX"),
    (0xa501_fcf5, "VxFS"),
];

/// Refuses a directory on one of them.
pub(super) fn check_file_system(path: &Path, magic: u32) -> Result<()> {
    match NETWORK_FILE_SYSTEMS.iter().find(|(known, _)| *known == magic) {
        None => Ok(()),
        Some((_, system)) => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} is on {system}, where byte-range locks do not reliably reach other hosts and a change wakes nobody",
                path.display()
            ),
        )
        .with_remedy("use a local directory, or ?network-fs=allow if only this host uses it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_refused_by_name() {
        let error = check_file_system(Path::new("/mnt"), 0x6969).unwrap_err();
        assert!(error.to_string().contains("NFS") && error.kind() == ErrorKind::Refused);
        assert!(check_file_system(Path::new("/mnt"), 0xef53).is_ok());
    }
}
