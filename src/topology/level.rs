//! How near two functions are.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How near two PCI functions are to each other, by the definitions of `nvidia-smi topo --matrix`. Nearer is less.
///
/// The table in the [module's documentation](super) says what each costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// "Connection traversing at most a single PCIe bridge".
    Pix,
    /// "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)".
    Pxb,
    /// "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)".
    Phb,
    /// "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node".
    Node,
    /// "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)".
    Sys,
    /// sysfs does not say: there is no PCI function, or nobody knows which NUMA node it belongs to.
    Unknown,
}

impl Level {
    /// All of them, nearest first.
    pub const ALL: [Self; 6] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys, Self::Unknown];

    fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Level {
    /// As `nvidia-smi` writes it: `PIX`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = Error;

    /// In any case.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] names the levels.
    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|level| level.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| Error::Descriptor {
            what: "level",
            reason: format!("{text:?}; the levels are PIX, PXB, PHB, NODE, SYS and unknown"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearer_is_less_and_the_name_is_read_back() {
        assert!(Level::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        for level in Level::ALL {
            assert_eq!(level.to_string().to_lowercase().parse::<Level>().unwrap(), level);
        }
        assert!("PIXX".parse::<Level>().unwrap_err().to_string().contains("NODE"));
        assert_eq!(format!("{:>5}", Level::Pix), "  PIX");
    }
}
