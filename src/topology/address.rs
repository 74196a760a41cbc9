//! The name of a PCI function.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The address of a PCI function: domain (or segment), bus, device and function.
///
/// It is the name that the kernel, CUDA and NVML agree on, and that no order of enumeration changes, unlike ordinals, which depend
/// on `CUDA_VISIBLE_DEVICES`. Parses what each of them writes, in any case: `0000:19:00.0` (sysfs, `cuDeviceGetPCIBusId`),
/// `00000000:19:00.0` (NVML, `nvidia-smi`), `19:00.0` (`lspci(8)`, in domain 0). Domains may have up to 32 bits: those behind
/// Intel's VMD, for one, have more than 16. Displayed as sysfs names it. The order is by domain, bus, device, function.
///
/// With the feature `serde` it is serialized as that text.
///
/// ```
/// use tokio_rdma::topology::PciAddress;
///
/// let address: PciAddress = "00000000:C1:00.0".parse()?;
/// assert_eq!(address.to_string(), "0000:c1:00.0");
/// assert_eq!(address, "c1:00.0".parse()?);
/// # Ok::<(), tokio_rdma::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// The address with these numbers; `None` when the device is above 31 or the function above 7.
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self { domain, bus, device, function })
    }

    /// The domain, which is a segment group of its own with 256 busses.
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus, 0 to 255.
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The device on the bus, 0 to 31.
    pub const fn device(self) -> u8 {
        self.device
    }

    /// The function of the device, 0 to 7.
    pub const fn function(self) -> u8 {
        self.function
    }

    /// Whether both are functions of one device.
    pub(super) fn same_device(self, other: Self) -> bool {
        Self { function: 0, ..self } == Self { function: 0, ..other }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PciAddress({self})")
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    /// # Errors
    ///
    /// [`Error::Descriptor`] when the text is no such address.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).ok_or_else(|| Error::Descriptor {
            what: "PCI address",
            reason: format!("{text:?}; the form is domain:bus:device.function in hexadecimal, as in 0000:19:00.0"),
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (device, function) = text.rsplit_once('.')?;
    let mut parts = device.rsplit(':');
    let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next().unwrap_or("0"));
    if parts.next().is_some() {
        return None;
    }
    let (bus, device) = (hex(bus, 2)?, hex(device, 2)?);
    PciAddress::new(hex(domain, 8)?, bus.try_into().ok()?, device.try_into().ok()?, hex(function, 1)?.try_into().ok()?)
}

/// A number of at most so many digits. `from_str_radix` alone would take a sign.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let fits = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl TryFrom<String> for PciAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tools_way_of_writing_it_is_read() {
        for (text, shown) in [
            ("0000:19:00.0", "0000:19:00.0"),
            ("00000000:19:00.0", "0000:19:00.0"),
            ("0000:C1:1F.7", "0000:c1:1f.7"),
            ("c1:00.1", "0000:c1:00.1"),
            ("10000:01:00.0", "10000:01:00.0"),
            ("FFFFFFFF:ff:1f.7", "ffffffff:ff:1f.7"),
            ("0:1:2.3", "0000:01:02.3"),
        ] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), shown, "{text}");
            assert_eq!(shown.parse::<PciAddress>().unwrap(), address);
        }
    }

    #[test]
    fn what_is_none_is_told_with_the_form() {
        for text in [
            "",
            ".",
            ":",
            "::.",
            "00:00",
            "0000:19:00",
            "0000:19:20.0",
            "0000:19:00.8",
            "0000:19:00.10",
            "0000:119:00.0",
            "1ffffffff:19:00.0",
            "0:0000:19:00.0",
            "+1:00.0",
            "0000:19:-1.0",
            "0000:19:00.0 ",
            "0000:1é:00.0",
            "mlx5_0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("0000:19:00.0"), "{error}");
        }
    }

    #[test]
    fn the_order_is_that_of_the_numbers() {
        let mut addresses =
            ["10000:00:00.0", "0000:0a:00.1", "0000:0a:00.0", "0000:09:1f.7"].map(|it| it.parse().unwrap());
        addresses.sort();
        let shown: Vec<_> = addresses.iter().map(PciAddress::to_string).collect();
        assert_eq!(shown, ["0000:09:1f.7", "0000:0a:00.0", "0000:0a:00.1", "10000:00:00.0"]);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_checks_what_it_reads() {
        let address: PciAddress = "10000:01:00.0".parse().unwrap();
        let text = serde_json::to_string(&address).unwrap();
        assert_eq!(text, "\"10000:01:00.0\"");
        assert_eq!(serde_json::from_str::<PciAddress>(&text).unwrap(), address);
        assert!(serde_json::from_str::<PciAddress>("\"19:00\"").unwrap_err().to_string().contains("19:00"));
    }
}
