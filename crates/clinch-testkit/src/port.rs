//! Free loopback ports that stay ours, also while the server that uses them is down.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// What a node of a Redis Cluster adds to its port for the bus between nodes.
const CLUSTER_BUS: u16 = 10_000;

/// A port of 127.0.0.1 that nobody else takes as long as this value lives.
///
/// It is bound by a socket that never listens. Binding it was exclusive, so another test process cannot have the
/// same one, and the kernel does not give it to an outgoing connection; a server that sets `SO_REUSEADDR`, as all
/// servers do, can bind it nevertheless.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reserved: Vec<OwnedFd>,
}

impl Port {
    /// Reserves a free port.
    pub fn free() -> Port {
        let (socket, number) = reserve(0).expect("some port is free");
        Port { number, _reserved: vec![socket] }
    }

    /// Reserves a free port for a node of a Redis Cluster, and the one of its bus.
    pub fn free_for_cluster() -> Port {
        let mut tried = Vec::new();
        loop {
            let (socket, number) = reserve(0).expect("some port is free");
            let bus = number.checked_add(CLUSTER_BUS).and_then(|bus| reserve(bus).ok());
            if let Some((bus, _)) = bus {
                return Port { number, _reserved: vec![socket, bus] };
            }
            // Kept until one fits, so that the kernel does not offer it again.
            tried.push(socket);
        }
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The port with its address.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.number))
    }
}

/// Binds a port, 0 for any, and then lets a server bind it as well.
fn reserve(port: u16) -> Result<(OwnedFd, u16), Errno> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    let bound = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok((socket, bound.port()))
}
