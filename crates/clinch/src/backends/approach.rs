//! What to say of a server that could not be reached.

use std::error::Error as _;
use std::io;

use crate::check::Check;
use crate::error::Error;

/// The step on the way to a server that failed, below TLS.
pub(super) fn unreached(error: &Error) -> Check {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    // What the resolver says is no error of the system's.
    let is_of_name =
        |cause: &io::Error| cause.raw_os_error().is_none() && cause.kind() != io::ErrorKind::TimedOut;
    match cause {
        Some(cause) if is_of_name(cause) => {
            Check::failed("name", error, "mend the host in the URL, or have DNS or /etc/hosts know it")
        }
        Some(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => Check::failed(
            "tcp",
            error,
            "nothing listens there: start the server, mend host or port in the URL, or have it listen on that address",
        ),
        Some(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
            Check::failed("tcp", error, "have the server's socket, or a firewall, let this user in")
        }
        Some(cause) if cause.kind() == io::ErrorKind::NotFound => {
            Check::failed("tcp", error, "name the socket on which the server listens")
        }
        _ => Check::failed("tcp", error, "look at the route and at firewalls, or mend the host in the URL"),
    }
}
