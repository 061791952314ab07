//! TLS for stores reached over TCP: rustls with ring, given to each connection by hand, so that no process-wide provider is needed.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use crate::error::{Error, ErrorKind, Result};
use crate::net::Stream;
use crate::url::StoreUrl;

/// The two ways to speak to one kind of store, as errors name them.
#[derive(Clone, Copy)]
pub(super) struct Schemes {
    pub(super) plain: &'static str,
    pub(super) encrypted: &'static str,
}

/// What the URL says about certificates: `ca=` trusts these authorities instead of the public ones, `cert=` and `key=`
/// show the server a certificate of ours. Paths of PEM files.
pub(super) fn config(
    url: &mut StoreUrl,
    schemes: Schemes,
    wanted: bool,
) -> Result<Option<Arc<ClientConfig>>> {
    let (ca, cert, key) = (url.take("ca")?, url.take("cert")?, url.take("key")?);
    if !wanted {
        return match ca.or(cert).or(key) {
            Some(_) => {
                let Schemes { plain, encrypted } = schemes;
                Err(Error::invalid(format!(
                    "ca=, cert= and key= are for {encrypted}; {plain} is not encrypted"
                )))
            }
            None => Ok(None),
        };
    }
    let mut roots = RootCertStore::empty();
    match &ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            for certificate in certificates(url, "ca", path)? {
                roots.add(certificate).map_err(|error| unusable(url, "ca", path, error))?;
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(ErrorKind::Unsupported, "TLS could not be set up").with_source(error))?
        .with_root_certificates(roots);
    let config = match (cert, key) {
        (None, None) => config.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let chain = certificates(url, "cert", &cert)?;
            let secret = PrivateKeyDer::from_pem_file(Path::new(&key))
                .map_err(|error| unusable(url, "key", &key, error))?;
            config
                .with_client_auth_cert(chain, secret)
                .map_err(|error| unusable(url, "cert", &cert, error))?
        }
        _ => return Err(Error::invalid("cert= and key= belong together; one is missing")),
    };
    Ok(Some(Arc::new(config)))
}

fn certificates(url: &StoreUrl, key: &str, path: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read =
        CertificateDer::pem_file_iter(Path::new(path)).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(list) if !list.is_empty() => Ok(list),
        Ok(_) => Err(Error::invalid(format!("{key}={} holds no certificate", url.shown(path)))),
        Err(error) => Err(unusable(url, key, path, error)),
    }
}

fn unusable(
    url: &StoreUrl,
    key: &str,
    path: &str,
    error: impl std::error::Error + Send + Sync + 'static,
) -> Error {
    let path = url.shown(path);
    Error::invalid(format!("{key}={path} cannot be used: {error}")).with_source(error)
}

/// Speaks TLS over a connection, or says why the server is not to be trusted.
pub(super) async fn over(
    stream: Box<dyn Stream>,
    config: &Arc<ClientConfig>,
    host: &str,
    plain: &str,
) -> Result<Box<dyn Stream>> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| Error::invalid(format!("\"{host}\" is no name for TLS")).with_source(error))?;
    match TlsConnector::from(config.clone()).connect(name, stream).await {
        Ok(stream) => Ok(Box::new(stream)),
        // A server that goes away in the middle is not one that lies.
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            Err(Error::new(ErrorKind::Refused, format!("no TLS with {host}: {error}"))
                .with_remedy(format!("ca= names the authority to trust, {plain} speaks without TLS"))
                .with_source(error))
        }
        Err(error) => {
            Err(Error::new(ErrorKind::Unavailable, format!("TLS with {host} failed: {error}"))
                .with_source(error))
        }
    }
}
