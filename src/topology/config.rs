//! Extended capabilities in a function's configuration space: ACS and ATS.
//!
//! PCI Express Base Specification, chapter 7: the list of extended capabilities starts at 0x100, each with a header whose low
//! 16 bits are its ID and whose top 12 bits are the offset of the next one. Without CAP_SYS_ADMIN the kernel shows the first
//! 64 bytes alone (`pci_read_config` in drivers/pci/pci-sysfs.c), in which no capability stands.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::answer::Answer;

const ACS: u16 = 0x000d;
const ATS: u16 = 0x000f;
const FIRST: u16 = 0x100;

/// Access Control Services of a bridge: whether it may send peer-to-peer requests up to the root complex instead of straight to
/// the other device below it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acs {
    /// The bridge has no such capability, and redirects nothing.
    Absent,
    /// The ACS Control register.
    Control(u16),
    /// It could not be read, for this reason.
    Unknown(String),
}

impl Acs {
    /// P2P Request Redirect, P2P Completion Redirect and P2P Egress Control: the bits by which the kernel's `p2pdma` tells that a
    /// bridge redirects.
    const REDIRECT: u16 = 0x04 | 0x08 | 0x20;

    /// Whether it redirects peer-to-peer traffic to the root complex, where it is slower, or with an IOMMU may fail.
    pub fn redirects(&self) -> Answer {
        match self {
            Self::Absent => Answer::No,
            Self::Control(control) => (control & Self::REDIRECT != 0).into(),
            Self::Unknown(why) => Answer::Unknown(why.clone()),
        }
    }
}

/// The configuration space in this file, which may not be readable.
pub(super) fn acs(file: &Path) -> Acs {
    let space = File::open(file);
    match find(|offset| dword(space.as_ref().ok()?, offset), ACS) {
        Ok(None) => Acs::Absent,
        Ok(Some(registers)) => Acs::Control((registers >> 16) as u16),
        Err(why) => Acs::Unknown(why.to_owned()),
    }
}

/// Whether the function may keep translations of its own (Address Translation Services): the capability is there, and enabled.
pub(super) fn ats(file: &Path) -> Answer {
    let space = File::open(file);
    match find(|offset| dword(space.as_ref().ok()?, offset), ATS) {
        Ok(registers) => registers.is_some_and(|registers| registers >> 31 == 1).into(),
        Err(why) => Answer::Unknown(why.to_owned()),
    }
}

/// Reads only what it needs: the kernel asks the device for each of these.
fn dword(space: &File, offset: u16) -> Option<u32> {
    let mut bytes = [0; 4];
    space.read_exact_at(&mut bytes, offset.into()).ok()?;
    Some(u32::from_le_bytes(bytes))
}

/// The second dword of an extended capability: its capability register, and above it its control register.
fn find(read: impl Fn(u16) -> Option<u32>, id: u16) -> Result<Option<u32>, &'static str> {
    const CUT: &str = "its configuration space ends within a capability";
    if read(FIRST).is_none() {
        return if read(0).is_none() {
            Err("its configuration space cannot be read")
        } else if read(0x40).is_none() {
            Err("not root: config space ends at 64 bytes")
        } else if is_express(&read) {
            Err("config space ends at 256 bytes: this machine does not show extended capabilities")
        } else {
            // Conventional PCI has no extended capabilities.
            Ok(None)
        };
    }
    let mut offset = FIRST;
    // As many as fit. What is not a list, but a ring, ends too.
    for _ in 0..(4096 - 256) / 8 {
        let header = read(offset).ok_or(CUT)?;
        match header {
            0 => return Ok(None),
            u32::MAX => return Err("its configuration space reads as ones: the device does not answer"),
            header if header as u16 == id => return read(offset + 4).ok_or(CUT).map(Some),
            header => offset = (header >> 20) as u16 & 0xffc,
        }
        if offset < FIRST {
            return Ok(None);
        }
    }
    Err("its list of capabilities has no end")
}

/// Whether there is a PCI Express capability among the first 256 bytes.
fn is_express(read: &impl Fn(u16) -> Option<u32>) -> bool {
    let has_list = read(4).is_some_and(|status| status >> 16 & 0x10 != 0);
    let mut offset = read(0x34).unwrap_or(0) as u16 & 0xfc;
    for _ in 0..(256 - 64) / 4 {
        match read(offset).filter(|_| has_list && offset >= 0x40) {
            None => return false,
            Some(header) if header as u8 == 0x10 => return true,
            Some(header) => offset = (header >> 8) as u16 & 0xfc,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn look(bytes: &[u8], id: u16) -> Result<Option<u32>, &'static str> {
        let read = |offset: u16| Some(u32::from_le_bytes(bytes.get(offset.into()..)?.first_chunk().copied()?));
        find(read, id)
    }

    fn space(length: usize, dwords: &[(usize, u32)]) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for (offset, dword) in dwords {
            bytes[*offset..][..4].copy_from_slice(&dword.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_capability_is_found_wherever_it_stands_in_the_list() {
        let two = space(4096, &[(0x100, 0x1481_0001), (0x148, 0x0001_000d), (0x14c, 0x001d_005f)]);
        assert_eq!(look(&two, ACS), Ok(Some(0x001d_005f)));
        assert_eq!(look(&two, ATS), Ok(None));
        assert_eq!(look(&space(4096, &[]), ACS), Ok(None));
    }

    #[test]
    fn a_space_that_is_cut_off_says_why() {
        assert_eq!(look(&[0; 64], ACS), Err("not root: config space ends at 64 bytes"));
        assert!(look(&[], ACS).unwrap_err().contains("cannot be read"));
        assert!(look(&[0xff; 4096], ACS).unwrap_err().contains("ones"));
        let ring = space(4096, &[(0x100, 0x2001_0001), (0x200, 0x1001_0002)]);
        assert!(look(&ring, ACS).unwrap_err().contains("no end"));
        let cut = space(0x104, &[(0x100, 0x0001_000d)]);
        assert!(look(&cut, ACS).unwrap_err().contains("within"));
    }

    #[test]
    fn of_256_bytes_only_conventional_pci_has_no_more() {
        let express = space(256, &[(0x04, 0x0010_0000), (0x34, 0x40), (0x40, 0x0000_5001), (0x50, 0x0002_0010)]);
        assert!(look(&express, ACS).unwrap_err().contains("256 bytes"));
        let conventional = space(256, &[(0x04, 0x0010_0000), (0x34, 0x40), (0x40, 0x0000_0001)]);
        assert_eq!(look(&conventional, ACS), Ok(None));
        assert_eq!(look(&space(256, &[]), ACS), Ok(None));
    }

    #[test]
    fn each_bit_that_redirects_counts() {
        for (control, redirects) in [
            (0x00, Answer::No),
            (0x01, Answer::No),
            (0x04, Answer::Yes),
            (0x08, Answer::Yes),
            (0x20, Answer::Yes),
            (0x1d, Answer::Yes),
            (0x10, Answer::No),
        ] {
            assert_eq!(Acs::Control(control).redirects(), redirects, "{control:#x}");
        }
        assert_eq!(Acs::Absent.redirects(), Answer::No);
        assert_eq!(Acs::Unknown("x".into()).redirects(), Answer::Unknown("x".into()));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), id in any::<u16>()) {
            let _ = look(&bytes, id);
        }
    }
}
