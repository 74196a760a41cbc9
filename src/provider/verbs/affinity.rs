//! Which CPUs are near a NIC, from sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

const SYSFS: &str = "/sys";

/// The numbers of the CPUs that share a NUMA node with the device (`local_cpulist` of its PCI function).
///
/// A software device has none of its own: those of the network interface that carries it count.
pub(super) fn local_cpus(name: &str) -> Result<Vec<usize>> {
    local_cpus_under(Path::new(SYSFS), name)
}

fn local_cpus_under(sysfs: &Path, name: &str) -> Result<Vec<usize>> {
    let device = sysfs.join("class/infiniband").join(name);
    let mut places = vec![device.join("device")];
    let mut carrier = String::new();
    if let Ok(interface) = fs::read_to_string(device.join("parent")) {
        let interface = interface.trim();
        places.push(sysfs.join("class/net").join(interface).join("device"));
        carrier = format!(", and {interface}, which carries it, has none either");
    }
    match places.iter().find_map(|place| cpulist(place)) {
        Some((file, text)) => parse(&text).ok_or_else(|| unknown(name, format!("{}: {text:?}", file.display()))),
        None => Err(unknown(name, format!("no PCI function of it has a local_cpulist{carrier}"))),
    }
}

fn unknown(name: &str, why: String) -> Error {
    Error::Invalid { operation: "find the CPUs near", reason: format!("{name}: {why}") }
}

/// The list of the device at `place`, or of the one that it hangs on: a virtio device's parent is the PCI function.
fn cpulist(place: &Path) -> Option<(PathBuf, String)> {
    let place = place.canonicalize().ok()?;
    place.ancestors().find_map(|place| {
        let file = place.join("local_cpulist");
        let text = fs::read_to_string(&file).ok()?;
        Some((file, text.trim().to_owned()))
    })
}

/// A list like `0-3,8`. `None` when it is something else, or names no CPU that a thread can be pinned to.
fn parse(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend(first..=last.min(rustix::thread::CpuSet::MAX_CPU - 1));
    }
    (!cpus.is_empty()).then_some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(parse("0-3,8,10-11").unwrap(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse("5").unwrap(), [5]);
        assert_eq!(parse("1022-4294967295").unwrap(), [1022, 1023]);
        for text in ["", "x", "1-", "-3", "3-1", "9999"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_nic_has_its_own_and_a_software_device_its_carriers() {
        let sysfs = tempfile::tempdir().unwrap();
        let at = |path: &str| sysfs.path().join(path);
        let link = |name: &str, to: &str| std::os::unix::fs::symlink(at(to), at(name)).unwrap();
        for dir in [
            "class/infiniband/mlx5_0",
            "class/infiniband/rxe0",
            "class/infiniband/rxe1",
            "class/net/eth0",
            "class/net/veth0",
            "devices/pci0000:00/0000:00:01.0/virtio1",
            "devices/pci0000:80/0000:81:00.0",
        ] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        fs::write(at("devices/pci0000:80/0000:81:00.0/local_cpulist"), "16-31\n").unwrap();
        fs::write(at("devices/pci0000:00/0000:00:01.0/local_cpulist"), "0-1\n").unwrap();
        link("class/infiniband/mlx5_0/device", "devices/pci0000:80/0000:81:00.0");
        link("class/net/eth0/device", "devices/pci0000:00/0000:00:01.0/virtio1");
        fs::write(at("class/infiniband/rxe0/parent"), "eth0\n").unwrap();
        fs::write(at("class/infiniband/rxe1/parent"), "veth0\n").unwrap();

        assert_eq!(local_cpus_under(sysfs.path(), "mlx5_0").unwrap(), (16..32).collect::<Vec<_>>());
        assert_eq!(local_cpus_under(sysfs.path(), "rxe0").unwrap(), [0, 1]);
        let text = local_cpus_under(sysfs.path(), "rxe1").unwrap_err().to_string();
        assert!(text.contains("rxe1") && text.contains("veth0"), "{text}");
        assert!(local_cpus_under(sysfs.path(), "none").is_err());
    }
}
