//! Reading sysfs, or a tree that looks like it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::address::PciAddress;

/// An attribute has at most a page; what stands in for one may be anything.
const LONGEST: u64 = 64 * 1024;

#[derive(Debug)]
pub(super) struct Sysfs {
    root: PathBuf,
}

/// Where a device hangs, by the components of its path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The host bridge's name, for example `pci0000:80`.
    pub(super) host_bridge: Option<String>,
    /// Functions from the host bridge down. The last one is the device's own, or the one that it hangs on.
    pub(super) functions: Vec<PciAddress>,
}

impl Sysfs {
    /// # Errors
    ///
    /// When there is no such folder.
    pub(super) fn new(root: &Path) -> io::Result<Self> {
        Ok(Self { root: root.canonicalize()? })
    }

    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// An attribute without the space around it; `None` when it cannot be read or is empty.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.at(path)).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    pub(super) fn number(&self, path: impl AsRef<Path>) -> Option<u32> {
        self.text(path)?.parse().ok()
    }

    /// Like `0x10de`.
    pub(super) fn hex(&self, path: impl AsRef<Path>) -> Option<u32> {
        let text = self.text(path)?;
        u32::from_str_radix(text.strip_prefix("0x").unwrap_or(&text), 16).ok()
    }

    /// Names in a folder, in order; none where there is no such folder.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_by_cached_key(|name| natural(name));
        names
    }

    /// The last component of what a link points to.
    pub(super) fn link(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// # Errors
    ///
    /// When the path or a link on it leads nowhere, or out of the tree.
    pub(super) fn place(&self, path: impl AsRef<Path>) -> io::Result<Place> {
        let real = self.at(path).canonicalize()?;
        let inside = real.strip_prefix(&self.root).map_err(|_| io::Error::other("a link leads out of sysfs"))?;
        Ok(Place::of(inside))
    }
}

impl Place {
    fn of(path: &Path) -> Self {
        let mut place = Self::default();
        for name in path.iter().filter_map(|name| name.to_str()) {
            if is_host_bridge(name) {
                // One behind another belongs to a device that makes a domain of its own, as Intel's VMD does.
                place = Self { host_bridge: Some(name.to_owned()), functions: Vec::new() };
            } else if let Ok(address) = name.parse() {
                place.functions.push(address);
            } else if !place.functions.is_empty() {
                break;
            }
        }
        place
    }
}

fn is_host_bridge(name: &str) -> bool {
    let numbers = name.strip_prefix("pci").and_then(|numbers| numbers.split_once(':'));
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    numbers.is_some_and(|(domain, bus)| hex(domain) && hex(bus))
}

/// Sorts `mlx5_10` behind `mlx5_9`.
pub(super) fn natural(name: &str) -> (String, u64, String) {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (stem, number) = name.split_at(name.len() - digits);
    (stem.to_owned(), number.parse().unwrap_or(0), name.to_owned())
}

/// A list like `0-3,8`, of numbers below `limit`; greater ones are left out. `None` when it is something else.
pub(super) fn list(text: &str, limit: usize) -> Option<Vec<usize>> {
    // However often a range is repeated.
    let mut listed = vec![false; limit];
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first {
            return None;
        }
        listed.iter_mut().take(last.saturating_add(1)).skip(first).for_each(|listed| *listed = true);
    }
    Some((0..limit).filter(|number| listed[*number]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers() {
        assert_eq!(list("0-3,8,10-11", 1024).unwrap(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(list("5", 1024).unwrap(), [5]);
        assert_eq!(list("1022-4294967295", 1024).unwrap(), [1022, 1023]);
        assert_eq!(list("3,1-3", 1024).unwrap(), [1, 2, 3]);
        assert!(list("9999", 1024).unwrap().is_empty());
        assert!(list("", 1024).unwrap().is_empty());
        for text in ["x", "1-", "-3", "3-1", "1--3"] {
            assert_eq!(list(text, 1024), None, "{text:?}");
        }
    }

    #[test]
    fn a_path_tells_where_a_device_hangs() {
        let place = |path: &str| {
            let Place { host_bridge, functions } = Place::of(Path::new(path));
            let functions: Vec<_> = functions.iter().map(PciAddress::to_string).collect();
            (host_bridge.unwrap_or_default(), functions.join(" "))
        };
        for (path, host, functions) in [
            ("devices/pci0000:80/0000:80:01.0/0000:81:00.0", "pci0000:80", "0000:80:01.0 0000:81:00.0"),
            ("devices/pci0000:00/0000:00:01.0/virtio1/net/eth0", "pci0000:00", "0000:00:01.0"),
            ("devices/platform/soc/1234.pcie/pci0001:00/0001:00:00.0", "pci0001:00", "0001:00:00.0"),
            ("devices/LNXSYSTM:00/VMBUS:01/47505500/pci0001:00/0001:00:00.0", "pci0001:00", "0001:00:00.0"),
            ("devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0", "pci10000:e0", "10000:e0:06.0"),
            ("devices/virtual/net/veth0", "", ""),
            ("", "", ""),
        ] {
            assert_eq!(place(path), (host.to_owned(), functions.to_owned()), "{path}");
        }
    }

    #[test]
    fn names_are_in_the_order_of_their_numbers() {
        let mut names = ["mlx5_10", "mlx5_9", "eth", "mlx5_99999999999999999999999"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["eth", "mlx5_99999999999999999999999", "mlx5_9", "mlx5_10"]);
    }
}
