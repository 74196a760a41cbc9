//! Where the bytes are.

#[cfg(feature = "cuda")]
pub mod gpu;

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use tokio_rdma::{Access, Buffer, ExposedRegion, ProtectionDomain, RemoteRegion, SourceBuffer, TargetBuffer};

/// A place for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    /// The GPU with this number.
    Gpu(usize),
}

/// Memory of one kind.
pub trait Memory: Send + Sync + 'static {
    type Buffer: SourceBuffer + TargetBuffer;
    type Exposed: Exposed;

    fn alloc(&self, domain: &ProtectionDomain, len: usize) -> Result<Self::Buffer>;
    fn fill(&self, buffer: &mut Self::Buffer, bytes: &[u8]) -> Result<()>;
    fn bytes(&self, buffer: &Self::Buffer) -> Result<Vec<u8>>;
    /// Memory with these bytes that the peer may use in every way.
    fn expose(&self, domain: &ProtectionDomain, bytes: &[u8]) -> Result<Self::Exposed>;
    /// What it is, and how a device gets at it.
    fn describe(&self, domain: &ProtectionDomain) -> Result<String>;
}

/// Memory that a peer uses.
pub trait Exposed: Send + Sync + 'static {
    fn remote(&self) -> RemoteRegion;
    fn bytes(&self) -> Result<Vec<u8>>;
}

/// The bytes that belong to a seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Says where bytes differ from those of a seed.
pub fn compare(what: impl fmt::Display, bytes: &[u8], seed: u64) -> Result<(), String> {
    let expected = pattern(bytes.len(), seed);
    match bytes.iter().zip(&expected).position(|(byte, expected)| byte != expected) {
        None => Ok(()),
        Some(at) => Err(format!("{what}: byte {at} of {} is {}, not {}", bytes.len(), bytes[at], expected[at])),
    }
}

/// Memory of the host.
pub struct Host;

impl Memory for Host {
    type Buffer = Buffer;
    type Exposed = ExposedRegion;

    fn alloc(&self, domain: &ProtectionDomain, len: usize) -> Result<Buffer> {
        Ok(domain.alloc(len)?)
    }

    fn fill(&self, buffer: &mut Buffer, bytes: &[u8]) -> Result<()> {
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn bytes(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(buffer.to_vec())
    }

    fn expose(&self, domain: &ProtectionDomain, bytes: &[u8]) -> Result<ExposedRegion> {
        let mut buffer = domain.alloc(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.expose(Access::all())?)
    }

    fn describe(&self, _: &ProtectionDomain) -> Result<String> {
        Ok("host".to_owned())
    }
}

impl Exposed for ExposedRegion {
    fn remote(&self) -> RemoteRegion {
        self.remote()
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len() as usize];
        self.copy_to(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// Memory that this program cannot use.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A GPU's.
    #[error(
        "memory: gpu:{ordinal} was asked for, and this program was built without the feature cuda; add --features cuda"
    )]
    NoSupport {
        /// Its number.
        ordinal: usize,
    },
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("gpu:").map(str::parse)) {
            ("host", _) => Ok(Self::Host),
            (_, Some(Ok(ordinal))) => Ok(Self::Gpu(ordinal)),
            _ => Err("expected host, or gpu:N with the GPU's number".to_owned()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(ordinal) => write!(f, "gpu:{ordinal}"),
        }
    }
}

#[test]
fn a_wrong_byte_is_told() {
    let mut bytes = pattern(100, 7);
    assert_eq!(compare("slot 3", &bytes, 7), Ok(()));
    bytes[41] ^= 1;
    assert!(compare("slot 3", &bytes, 7).unwrap_err().starts_with("slot 3: byte 41 of 100 is "));
    assert!(compare("slot 3", &pattern(100, 7), 8).is_err());
}
