//! What both ends tell each other while connecting, inside of the provider's private data.
//!
//! ```text
//! byte 0     version of this layout
//! byte 1     length of the user's private data; the highest bit says that the sender has a pre-shared key to be proved
//! byte 2..   the user's private data
//! ```

use crate::error::{Error, Result};
use crate::provider::{PRIVATE_DATA, PeerInfo};

const VERSION: u8 = 1;
const HEADER: usize = 2;
/// In the byte of the length. Whoever does not know it takes the length for one that is too long, and refuses.
const KEYED: u8 = 0x80;

/// The user's share of the private data, in bytes.
pub(super) const MAX_USER_DATA: usize = PRIVATE_DATA - HEADER;

/// What one end says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub user: Vec<u8>,
    /// It wants the pre-shared key proved.
    pub keyed: bool,
}

pub(super) fn encode(user: &[u8], keyed: bool) -> Result<Vec<u8>> {
    if user.len() > MAX_USER_DATA {
        return Err(Error::Limit {
            operation: "connect",
            what: "private data length",
            value: user.len() as u64,
            limit: MAX_USER_DATA as u64,
            hint: "send longer data as the first message",
        });
    }
    let mut bytes = vec![VERSION, user.len() as u8 | if keyed { KEYED } else { 0 }];
    bytes.extend_from_slice(user);
    Ok(bytes)
}

pub(super) fn decode(bytes: &[u8]) -> std::result::Result<Hello, String> {
    match bytes {
        [VERSION, length, user @ ..] => {
            let (length, keyed) = (length & !KEYED, length & KEYED != 0);
            match user.get(..usize::from(length)) {
                Some(user) => Ok(Hello { user: user.to_vec(), keyed }),
                None => Err(format!("private data of {length} bytes announced, {} sent", user.len())),
            }
        }
        [version, ..] => Err(format!("connection setup version {version}, this side speaks {VERSION}")),
        [] => Err("the connection request carries no setup data; is the peer a tokio-rdma program?".to_owned()),
    }
}

pub(super) fn of_peer(peer: &PeerInfo) -> Result<Hello> {
    decode(&peer.private_data).map_err(|reason| Error::Handshake { step: "setup", peer: peer.address.clone(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_comes_back() {
        for len in [0, 1, MAX_USER_DATA] {
            for keyed in [false, true] {
                let user = vec![7; len];
                let mut bytes = encode(&user, keyed).unwrap();
                // RDMA CM hands on as much as fits a message, whatever was given to it.
                bytes.resize(PRIVATE_DATA, 0);
                assert_eq!(decode(&bytes).unwrap(), Hello { user, keyed });
            }
        }
        assert!(encode(&[0; MAX_USER_DATA + 1], false).is_err());
    }

    #[test]
    fn hostile_data_is_refused() {
        for bytes in [&[][..], &[VERSION], &[VERSION, 1], &[0, 0], &[VERSION, 127, 1, 2], &[VERSION, KEYED | 3, 1, 2]] {
            assert!(decode(bytes).is_err(), "{bytes:?}");
        }
    }
}
