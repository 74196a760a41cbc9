//! What server and workers tell each other, in bytes. All numbers are little-endian.
//!
//! | from | how | what |
//! |---|---|---|
//! | both | private data of the connection | [`Hello`] |
//! | server | Send | [`Order`]: first a welcome, then work, at last the end |
//! | worker | Read | the parameters, see `published` |
//! | worker | Write | [`Header`], then gradient and loss, into memory that the server exposed for this worker alone |
//! | worker | the immediate of that Write | the ticket's lower 32 bits |

use anyhow::{Context, Result, bail, ensure};
use tokio_rdma::RemoteRegion;

use crate::model::PARAMETERS;

/// Bytes of the parameters.
pub const PARAMETERS_LEN: usize = PARAMETERS * size_of::<f32>();

/// Numbers of a gradient: behind the gradient itself stands the loss, which is known where that is computed, and when.
pub const GRADIENT: usize = PARAMETERS + 1;

/// Bytes of a gradient and its loss.
pub const GRADIENT_LEN: usize = GRADIENT * size_of::<f32>();

/// Who is there, before anything else is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the worker computes on; nothing in the server's.
    pub computes_on: String,
}

impl Hello {
    const MAGIC: [u8; 8] = *b"PSERVER2";

    /// The most bytes of a name: with what else there is they fit into a connection's private data.
    const MAX_NAME: usize = 32;

    pub fn to_bytes(&self) -> Vec<u8> {
        let name = self.computes_on.as_bytes();
        [&Self::MAGIC[..], &(PARAMETERS as u64).to_le_bytes(), &name[..name.len().min(Self::MAX_NAME)]].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>().context("a short hello")?;
        ensure!(*magic == Self::MAGIC, "hello: it begins with {}; is the peer this program?", magic.escape_ascii());
        let (parameters, name) = rest.split_first_chunk().context("a short hello")?;
        let parameters = u64::from_le_bytes(*parameters);
        ensure!(
            parameters == PARAMETERS as u64,
            "hello: the peer's model has {parameters} parameters, this one's {PARAMETERS}; run one version of the program"
        );
        Ok(Self { computes_on: String::from_utf8_lossy(name).into_owned() })
    }
}

/// What the server tells a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Welcome(Welcome),
    Work(Work),
    /// The training is over; the worker closes.
    Finish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    pub worker: u32,
    /// Samples of a ticket.
    pub batch: u32,
    /// Of the order of the samples.
    pub seed: u64,
    pub published: Published,
    /// What the worker writes into: the header, and the gradient with its loss, which may be in another processor's memory.
    pub header: RemoteRegion,
    pub gradient: RemoteRegion,
}

/// Where the parameters are; `published` tells how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    pub stamps: RemoteRegion,
    pub copies: RemoteRegion,
}

/// Compute the gradient of a ticket's samples. The worker's slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub ticket: u64,
    /// Of the parameters, or a later one.
    pub version: u64,
}

impl Order {
    /// Bytes of the longest one.
    pub const MAX_LEN: usize = 24 + 4 * RemoteRegion::WIRE_LEN;

    pub fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Welcome(Welcome { worker, batch, seed, published, header, gradient }) => {
                let words = words([1, u64::from(worker) | u64::from(batch) << 32, seed]);
                let Published { stamps, copies } = published;
                let regions = [stamps, copies, header, gradient].map(|region| region.to_bytes());
                [&words[..], &regions.concat()].concat()
            }
            Self::Work(Work { ticket, version }) => words([2, ticket, version]),
            Self::Finish => words([3, 0, 0]),
        }
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (words, rest) = bytes.split_first_chunk::<24>().context("an order of fewer than 24 bytes")?;
        let [kind, first, second] = [0, 8, 16].map(|at| word(words, at));
        match (kind, rest.len()) {
            (1, _) => {
                let mut regions = rest.chunks(RemoteRegion::WIRE_LEN);
                let mut region =
                    || Ok::<_, anyhow::Error>(RemoteRegion::from_bytes(regions.next().context("a short welcome")?)?);
                let (published, header) = (Published { stamps: region()?, copies: region()? }, region()?);
                let gradient = region()?;
                ensure!(regions.next().is_none(), "welcome: it is too long");
                for (what, region, len) in [("header", header, Header::LEN), ("gradient", gradient, GRADIENT_LEN)] {
                    let there = region.len();
                    ensure!(there == len as u64, "welcome: the {what} has {there} bytes instead of {len}");
                }
                let (worker, batch) = (first as u32, (first >> 32) as u32);
                ensure!(batch > 0, "welcome: the batch is 0, the smallest one is 1");
                Ok(Self::Welcome(Welcome { worker, batch, seed: second, published, header, gradient }))
            }
            (2, 0) => Ok(Self::Work(Work { ticket: first, version: second })),
            (3, 0) => Ok(Self::Finish),
            (_, rest) => bail!("order number {kind} with {rest} bytes more; run one version of the program"),
        }
    }
}

/// What goes before a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub ticket: u64,
    /// The version of the parameters that it was computed with.
    pub base: u64,
    pub samples: u32,
    /// Bytes of parameters that this worker has read on this connection.
    pub pulled: u64,
    /// Pulls that it had to begin again because the server was faster.
    pub repeated: u64,
}

impl Header {
    pub const LEN: usize = 40;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let Self { ticket, base, samples, pulled, repeated } = self;
        let mut bytes = [0; Self::LEN];
        bytes.copy_from_slice(&words([ticket, base, u64::from(samples), pulled, repeated]));
        bytes
    }

    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [ticket, base, samples, pulled, repeated] = [0, 8, 16, 24, 32].map(|at| word(bytes, at));
        // More than anybody asked for, in any case.
        let samples = u32::try_from(samples).unwrap_or(u32::MAX);
        Self { ticket, base, samples, pulled, repeated }
    }
}

/// Reads as many as there is room for; bytes that are missing leave the rest as it was.
pub fn floats_from_bytes(bytes: &[u8], floats: &mut [f32]) {
    let chunks = bytes.chunks_exact(size_of::<f32>());
    floats.iter_mut().zip(chunks).for_each(|(float, it)| *float = f32::from_le_bytes([it[0], it[1], it[2], it[3]]));
}

/// Writes as many as there is room for.
pub fn floats_to_bytes(floats: &[f32], bytes: &mut [u8]) {
    let chunks = bytes.chunks_exact_mut(size_of::<f32>());
    chunks.zip(floats).for_each(|(bytes, float)| bytes.copy_from_slice(&float.to_le_bytes()));
}

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The caller's bytes are long enough.
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio_rdma::Access;

    fn any_order() -> impl Strategy<Value = Order> {
        let region = |len| RemoteRegion::new(64, len, 7, Access::REMOTE_READ).unwrap();
        let welcome = (any::<u32>(), 1..u32::MAX, any::<u64>()).prop_map(move |(worker, batch, seed)| {
            let published = Published { stamps: region(100), copies: region(200) };
            let (header, gradient) = (region(Header::LEN as u64), region(GRADIENT_LEN as u64));
            Order::Welcome(Welcome { worker, batch, seed, published, header, gradient })
        });
        let work = (any::<u64>(), any::<u64>()).prop_map(|(ticket, version)| Order::Work(Work { ticket, version }));
        prop_oneof![welcome, work, Just(Order::Finish)]
    }

    proptest! {
        #[test]
        fn orders_come_back_whole_and_in_no_other_length(order in any_order(), len in 0..Order::MAX_LEN + 8) {
            let mut bytes = order.to_bytes();
            prop_assert!(bytes.len() <= Order::MAX_LEN);
            prop_assert_eq!(Order::from_bytes(&bytes).unwrap(), order);
            let whole = bytes.len();
            bytes.resize(len, 0);
            prop_assert_eq!(Order::from_bytes(&bytes).is_ok(), len == whole);
        }

        #[test]
        fn headers_come_back(ticket: u64, base: u64, samples: u32, pulled: u64, repeated: u64) {
            let header = Header { ticket, base, samples, pulled, repeated };
            prop_assert_eq!(Header::from_bytes(&header.to_bytes()), header);
        }
    }

    #[test]
    fn a_hello_of_another_program_is_refused() {
        let hello = Hello { computes_on: "the CPU".into() };
        let bytes = hello.to_bytes();
        assert_eq!(Hello::from_bytes(&bytes).unwrap(), hello);
        assert!(bytes.len() <= 54);
        for damaged in [0, 8] {
            let mut bytes = bytes.clone();
            bytes[damaged] ^= 1;
            assert!(Hello::from_bytes(&bytes).is_err());
        }
        assert!(Hello::from_bytes(&bytes[..15]).is_err());
    }
}
