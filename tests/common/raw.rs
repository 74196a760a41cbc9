//! Plain sockets to where a listener of the software device listens, for clients that do not behave.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rdma::Address;

pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Connects, and says nothing.
pub async fn connect(address: &Address) -> Box<dyn Stream> {
    match address {
        Address::Ip(address) => Box::new(TcpStream::connect(address).await.unwrap()),
        Address::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
        other => panic!("{other} is no socket's address"),
    }
}

/// A plain listening socket: whoever connects meets somebody who does not speak the protocol.
pub enum RawListener {
    Tcp(TcpListener),
    Unix(UnixListener, Address),
}

impl RawListener {
    pub async fn bind(address: &Address) -> Self {
        match address {
            Address::Ip(address) => Self::Tcp(TcpListener::bind(address).await.unwrap()),
            Address::Unix(path) => Self::Unix(UnixListener::bind(path).unwrap(), address.clone()),
            other => panic!("{other} is no socket's address"),
        }
    }

    pub fn address(&self) -> Address {
        match self {
            Self::Tcp(listener) => listener.local_addr().unwrap().into(),
            Self::Unix(_, address) => address.clone(),
        }
    }

    pub async fn accept(&self) -> Box<dyn Stream> {
        match self {
            Self::Tcp(listener) => Box::new(listener.accept().await.unwrap().0),
            Self::Unix(listener, _) => Box::new(listener.accept().await.unwrap().0),
        }
    }
}
