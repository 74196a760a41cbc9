//! What both ends tell each other while connecting, inside of the provider's private data.
//!
//! ```text
//! byte 0     version of this layout
//! byte 1     length of the user's private data
//! byte 2..   the user's private data
//! ```

use crate::error::{Error, Result};
use crate::provider::{PRIVATE_DATA, PeerInfo};

const VERSION: u8 = 1;
const HEADER: usize = 2;

/// The user's share of the private data, in bytes.
pub(super) const MAX_USER_DATA: usize = PRIVATE_DATA - HEADER;

pub(super) fn encode(user: &[u8]) -> Result<Vec<u8>> {
    if user.len() > MAX_USER_DATA {
        return Err(Error::Limit {
            operation: "connect",
            what: "private data length",
            value: user.len() as u64,
            limit: MAX_USER_DATA as u64,
            hint: "send longer data as the first message",
        });
    }
    let mut bytes = vec![VERSION, user.len() as u8];
    bytes.extend_from_slice(user);
    Ok(bytes)
}

pub(super) fn decode(bytes: &[u8]) -> std::result::Result<Vec<u8>, String> {
    match bytes {
        [VERSION, length, user @ ..] if usize::from(*length) <= user.len() => Ok(user[..usize::from(*length)].to_vec()),
        [VERSION, length, user @ ..] => Err(format!("private data of {length} bytes announced, {} sent", user.len())),
        [version, ..] => Err(format!("connection setup version {version}, this side speaks {VERSION}")),
        [] => Err("the connection request carries no setup data; is the peer a tokio-rdma program?".to_owned()),
    }
}

pub(super) fn private_data(peer: &PeerInfo) -> Result<Vec<u8>> {
    decode(&peer.private_data).map_err(|reason| Error::Handshake { step: "setup", peer: peer.address.clone(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_comes_back() {
        for len in [0, 1, MAX_USER_DATA] {
            let user = vec![7; len];
            assert_eq!(decode(&encode(&user).unwrap()).unwrap(), user);
        }
        assert!(encode(&[0; MAX_USER_DATA + 1]).is_err());
    }

    #[test]
    fn hostile_data_is_refused() {
        for bytes in [&[][..], &[VERSION], &[VERSION, 1], &[0, 0], &[VERSION, 255, 1, 2]] {
            assert!(decode(bytes).is_err(), "{bytes:?}");
        }
    }
}
