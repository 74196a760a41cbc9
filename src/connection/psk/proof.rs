//! What a proof is: a keyed hash (HMAC, RFC 2104) over all that the two ends have said, and over which of them it is.
//!
//! Fresh random numbers of both ends are in it, so no proof is good twice; the role, so none is good when it is sent back;
//! the private data of both, so nobody can have changed that on the way.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{PreSharedKey, Role};

/// So that no other use of the same key makes the same hash.
const LABEL: &[u8] = b"tokio-rdma pre-shared key 1\0";

pub(super) const NONCE: usize = 32;
pub(super) const PROOF: usize = 32;

/// A number that was never said before.
pub(super) type Nonce = [u8; NONCE];

/// Makes and checks the proofs of one connection.
pub(super) struct Prover {
    /// Fed with all but the role and the numbers.
    hash: Hmac<Sha256>,
}

impl Prover {
    /// `private_data`: the client's and the server's.
    pub(super) fn new(key: &PreSharedKey, private_data: [&[u8]; 2]) -> Self {
        let mut hash = Hmac::<Sha256>::new_from_slice(key.bytes()).expect("HMAC takes a key of any length");
        hash.update(LABEL);
        for data in private_data {
            hash.update(&[data.len() as u8]); // 54 at most
            hash.update(data);
        }
        Self { hash }
    }

    /// The proof of the end that has this role.
    pub(super) fn prove(&self, role: Role, server: &Nonce, client: &Nonce) -> [u8; PROOF] {
        self.hash(role, server, client).finalize().into_bytes().into()
    }

    /// Whether `proof` is that end's. Takes the same time whatever is wrong with it.
    pub(super) fn check(&self, role: Role, server: &Nonce, client: &Nonce, proof: &[u8]) -> bool {
        self.hash(role, server, client).verify_slice(proof).is_ok()
    }

    fn hash(&self, role: Role, server: &Nonce, client: &Nonce) -> Hmac<Sha256> {
        let mut hash = self.hash.clone();
        hash.update(match role {
            Role::Client => b"C",
            Role::Server => b"S",
        });
        hash.update(server);
        hash.update(client);
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prover(key: &[u8], client: &[u8], server: &[u8]) -> Prover {
        Prover::new(&PreSharedKey::new(key).unwrap(), [client, server])
    }

    #[test]
    fn a_proof_fits_what_it_was_made_for_and_nothing_else() {
        let (key, a, b) = (&[7; 32][..], [1; NONCE], [2; NONCE]);
        let right = prover(key, b"ab", b"c");
        let proof = right.prove(Role::Client, &a, &b);
        assert!(right.check(Role::Client, &a, &b, &proof));
        assert!(!right.check(Role::Server, &a, &b, &proof), "sent back");
        assert!(!right.check(Role::Client, &b, &a, &proof), "other numbers");
        assert!(!right.check(Role::Client, &a, &a, &proof), "a number used again");
        assert!(!prover(&[8; 32], b"ab", b"c").check(Role::Client, &a, &b, &proof), "another key");
        assert!(!prover(key, b"a", b"bc").check(Role::Client, &a, &b, &proof), "other private data");
        assert!(!right.check(Role::Client, &a, &b, &proof[..31]), "cut off");
        assert!(!right.check(Role::Client, &a, &b, &[]));
        for bit in 0..256 {
            let mut changed = proof;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!right.check(Role::Client, &a, &b, &changed), "bit {bit}");
        }
    }
}
