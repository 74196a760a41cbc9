//! Where a listener binds and a connection connects.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};

/// An address that a connection can be set up over.
///
/// Anything that converts into one is accepted where an address is asked for: a [`SocketAddr`], an `(IpAddr, u16)`,
/// a path (a Unix-domain socket), or a string: `"127.0.0.1:7471"`, `"host.example:7471"` (resolved when used)
/// or `"unix:/run/app.sock"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// An IP address and port.
    Ip(SocketAddr),
    /// A host name and port, resolved when the address is used.
    Name(String),
    /// A Unix-domain socket's path.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(addr) => addr.fmt(f),
            Self::Name(name) => name.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(invalid(text, "the path after \"unix:\" is empty"));
            }
            return Ok(Self::Unix(path.into()));
        }
        if let Ok(addr) = text.parse() {
            return Ok(Self::Ip(addr));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(Self::Name(text.to_owned())),
            _ => Err(invalid(text, "expected IP:PORT, HOST:PORT or unix:PATH")),
        }
    }
}

fn invalid(text: &str, why: &str) -> Error {
    Error::Descriptor { what: "address", reason: format!("{text:?}: {why}") }
}

impl From<SocketAddr> for Address {
    fn from(addr: SocketAddr) -> Self {
        Self::Ip(addr)
    }
}

impl From<(IpAddr, u16)> for Address {
    fn from(addr: (IpAddr, u16)) -> Self {
        Self::Ip(addr.into())
    }
}

impl From<&Path> for Address {
    fn from(path: &Path) -> Self {
        Self::Unix(path.to_owned())
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

/// Values that name an [`Address`]; strings are parsed, so they can fail.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no address",
    note = "use \"IP:PORT\", \"HOST:PORT\" or \"unix:PATH\", a SocketAddr, an (IpAddr, u16), a path or an Address"
)]
pub trait IntoAddress {
    /// The address, or what is wrong with it.
    fn into_address(self) -> Result<Address>;
}

impl IntoAddress for &str {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for &String {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for String {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for &Address {
    fn into_address(self) -> Result<Address> {
        Ok(self.clone())
    }
}

impl IntoAddress for &SocketAddr {
    fn into_address(self) -> Result<Address> {
        Ok((*self).into())
    }
}

impl IntoAddress for &PathBuf {
    fn into_address(self) -> Result<Address> {
        Ok(self.as_path().into())
    }
}

macro_rules! infallible {
    ($($from:ty),*) => {$(
        impl IntoAddress for $from {
            fn into_address(self) -> Result<Address> {
                Ok(self.into())
            }
        }
    )*};
}
infallible!(Address, SocketAddr, (IpAddr, u16), &Path, PathBuf);
