//! Connecting two programs that have a bootstrap of their own (MPI, etcd, a file): each makes an endpoint,
//! they exchange the bytes, and both connect, in any order.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::connect::{Acceptor, Parts, dial};
use super::context::{Pd, Shared, at_most};
use super::cq::Cq;
use super::handshake::{Handshake, Hello};
use super::qp::Qp;
use super::wire::VERSION;
use crate::address::Address;
use crate::error::{Error, Result};
use crate::provider::{PRIVATE_DATA, PeerInfo, QpConfig};
use crate::random;

/// Longest endpoint: a Unix path of 108 bytes fits.
const ENDPOINT: usize = 128;
const IPV4: u8 = 4;
const IPV6: u8 = 6;
const UNIX: u8 = 1;

/// For so long somebody who connects here by mistake may stay silent before the next one gets a chance.
const STRANGER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Rendezvous {
    ctx: Arc<Shared>,
    acceptor: Acceptor,
    nonce: u64,
    endpoint: Vec<u8>,
}

impl Rendezvous {
    pub(super) async fn bind(ctx: &Arc<Shared>, local: &Address) -> Result<Self> {
        let acceptor = Acceptor::bind(ctx, local).await?;
        // Zero means "no rendezvous" in a handshake.
        let nonce = u64::from_ne_bytes(random::bytes()?) | 1;
        let endpoint = encode(nonce, acceptor.local_address())?;
        Ok(Self { ctx: Arc::clone(ctx), acceptor, nonce, endpoint })
    }

    pub(crate) fn endpoint(&self) -> &[u8] {
        &self.endpoint
    }

    pub(crate) async fn connect(
        self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        remote: &[u8],
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        let parts = Parts::check("rendezvous", &self.ctx, pd, cq, config)?;
        at_most("rendezvous", "private data", private_data.len() as u64, PRIVATE_DATA as u64)?;
        let (peer_nonce, address) = decode(remote)?;
        if peer_nonce == self.nonce {
            let reason = "this is the endpoint of this side; the other side's is needed".to_owned();
            return Err(Error::Descriptor { what: "endpoint", reason });
        }
        let token = self.ctx.next_id();
        let fresh = parts.hello(token, private_data.to_vec());
        let hello = Hello { nonce: self.nonce, peer_nonce, ..fresh };
        // Both hold both endpoints, so both come to the same conclusion about who calls whom.
        if self.nonce > peer_nonce {
            return parts.initiate(dial(&address).await?, address.to_string(), hello, token).await;
        }
        let (handshake, request) = self.await_peer(peer_nonce).await?;
        parts.answer(handshake, hello, request, token).await
    }

    /// Accepts until the right peer comes; strangers are sent away.
    async fn await_peer(&self, peer_nonce: u64) -> Result<(Handshake<'_>, Hello)> {
        loop {
            let (stream, peer) = self.acceptor.accept().await?.into_parts();
            let mut handshake = Handshake { ctx: &self.ctx, stream, peer };
            let Ok(request) = tokio::time::timeout(STRANGER, handshake.await_request()).await else { continue };
            match request {
                Ok(request) if (request.nonce, request.peer_nonce) == (peer_nonce, self.nonce) => {
                    return Ok((handshake, request));
                }
                Ok(_) => {
                    handshake.reject("another endpoint is awaited here").await;
                }
                Err(error) if self.ctx.faults.is_some() => return Err(error),
                Err(_) => {}
            }
        }
    }
}

fn encode(nonce: u64, address: &Address) -> Result<Vec<u8>> {
    let mut out = vec![VERSION];
    out.extend_from_slice(&nonce.to_le_bytes());
    match address {
        Address::Ip(socket) => {
            match socket.ip() {
                IpAddr::V4(ip) => {
                    out.push(IPV4);
                    out.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(IPV6);
                    out.extend_from_slice(&ip.octets());
                }
            }
            out.extend_from_slice(&socket.port().to_le_bytes());
        }
        Address::Unix(path) => {
            out.push(UNIX);
            out.extend_from_slice(path.as_os_str().as_bytes());
        }
        // A listener's own address is never a name.
        Address::Name(name) => return Err(wrong(format!("{name} is not resolved"))),
    }
    if out.len() > ENDPOINT {
        return Err(wrong(format!("{} bytes are too long", out.len())));
    }
    Ok(out)
}

fn decode(bytes: &[u8]) -> Result<(u64, Address)> {
    if bytes.len() > ENDPOINT {
        return Err(wrong(format!("{} bytes are too long", bytes.len())));
    }
    let short = || wrong("it is cut short".to_owned());
    let ([version], rest) = bytes.split_first_chunk().ok_or_else(short)?;
    if *version != VERSION {
        return Err(wrong(format!("it has version {version}, this side speaks {VERSION}")));
    }
    let (nonce, rest) = rest.split_first_chunk().ok_or_else(short)?;
    let ([kind], rest) = rest.split_first_chunk().ok_or_else(short)?;
    let address = match (*kind, rest.len()) {
        (IPV4, 6) => {
            let (ip, port) = rest.split_first_chunk::<4>().ok_or_else(short)?;
            Address::Ip(SocketAddr::new(IpAddr::from(*ip), u16::from_le_bytes([port[0], port[1]])))
        }
        (IPV6, 18) => {
            let (ip, port) = rest.split_first_chunk::<16>().ok_or_else(short)?;
            Address::Ip(SocketAddr::new(IpAddr::from(*ip), u16::from_le_bytes([port[0], port[1]])))
        }
        (UNIX, 1..) => Address::Unix(PathBuf::from(std::ffi::OsString::from_vec(rest.to_vec()))),
        _ => return Err(wrong("its address makes no sense".to_owned())),
    };
    Ok((u64::from_le_bytes(*nonce), address))
}

fn wrong(reason: String) -> Error {
    Error::Descriptor { what: "endpoint", reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_the_round_trip() {
        for text in ["127.0.0.1:7471", "[fe80::1]:65535", "unix:/run/some/path.sock"] {
            let address: Address = text.parse().unwrap();
            let bytes = encode(77, &address).unwrap();
            assert_eq!(decode(&bytes).unwrap(), (77, address.clone()));
            if !matches!(address, Address::Unix(_)) {
                for len in 0..bytes.len() {
                    assert!(decode(&bytes[..len]).is_err());
                }
            }
        }
        assert!(decode(&[0xff; 40]).is_err());
        assert!(decode(&[VERSION; 200]).is_err());
    }
}
