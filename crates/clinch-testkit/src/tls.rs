//! Certificates of a test's own authority, made by `openssl`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Sections of extensions: an authority, and the two that it signs.
const CONFIG: &str = "\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[server]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, DNS:localhost
[client]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = clientAuth
";

/// An authority with a certificate for a server on 127.0.0.1 and one for a client, as PEM files in a directory.
#[derive(Debug)]
pub struct Certificates(PathBuf);

impl Certificates {
    /// Makes them in `dir`.
    pub fn make(dir: &Path) -> Certificates {
        std::fs::write(dir.join("openssl.cnf"), CONFIG).expect("the directory can be written");
        let issue = |name: &str, signed_by: &[&str]| {
            let made = Command::new("openssl")
                .current_dir(dir)
                .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
                .args(["-config", "openssl.cnf", "-days", "3650", "-extensions", name])
                .args(["-subj", &format!("/CN=clinch test {name}")])
                .args(["-keyout", &format!("{name}.key"), "-out", &format!("{name}.pem")])
                .args(signed_by)
                .output()
                .expect("openssl is installed");
            assert!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
        };
        let by_ca = ["-CA", "ca.pem", "-CAkey", "ca.key"];
        issue("ca", &[]);
        issue("server", &by_ca);
        issue("client", &by_ca);
        Certificates(dir.to_path_buf())
    }

    /// The certificate of the authority.
    pub fn ca(&self) -> PathBuf {
        self.0.join("ca.pem")
    }

    /// The certificate of the server.
    pub fn server_cert(&self) -> PathBuf {
        self.0.join("server.pem")
    }

    /// The key of the server.
    pub fn server_key(&self) -> PathBuf {
        self.0.join("server.key")
    }

    /// The certificate of the client.
    pub fn client_cert(&self) -> PathBuf {
        self.0.join("client.pem")
    }

    /// The key of the client.
    pub fn client_key(&self) -> PathBuf {
        self.0.join("client.key")
    }
}
