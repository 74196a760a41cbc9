//! Which CPUs are near a NIC, and running there.

use std::path::Path;

use super::sysfs::{self, Sysfs};
use super::{ROOT, nic};
use crate::error::{Error, Result};

/// The numbers of the CPUs that share a NUMA node with the RDMA device: `local_cpulist` of its PCI function.
pub(crate) fn local_cpus(name: &str) -> Result<Vec<usize>> {
    Sysfs::new(Path::new(ROOT)).map_err(|error| unknown(name, error.to_string())).and_then(|sysfs| of_nic(&sysfs, name))
}

fn of_nic(sysfs: &Sysfs, name: &str) -> Result<Vec<usize>> {
    let function = nic::function(sysfs, name).map_err(|why| unknown(name, why))?;
    list_of(sysfs, &super::function::path(function)).map_err(|why| unknown(name, why))
}

/// Of a PCI function, never empty.
pub(super) fn list_of(sysfs: &Sysfs, function: &Path) -> Result<Vec<usize>, String> {
    let file = function.join("local_cpulist");
    let text = sysfs.text(&file).unwrap_or_default();
    // Some cannot be had, or are so great that no thread can be pinned there.
    let cpus = sysfs::list(&text, rustix::thread::CpuSet::MAX_CPU).filter(|cpus| !cpus.is_empty());
    cpus.ok_or_else(|| format!("{} is {text:?}", file.display()))
}

fn unknown(name: &str, why: String) -> Error {
    Error::Invalid { operation: "find the CPUs near", reason: format!("{name}: {why}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_has_its_own_and_a_software_device_its_carriers() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        let file = |path: &str, text: &str| {
            std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            std::fs::write(at(path), text).unwrap();
        };
        let link = |path: &str, target: &str| {
            std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(at(target), at(path)).unwrap();
        };
        file("devices/pci0000:80/0000:81:00.0/local_cpulist", "16-31\n");
        file("devices/pci0000:00/0000:00:01.0/local_cpulist", "0-1\n");
        file("devices/pci0000:00/0000:00:01.0/virtio1/features", "");
        file("devices/pci0000:00/0000:00:02.0/local_cpulist", "\n");
        for function in ["pci0000:80/0000:81:00.0", "pci0000:00/0000:00:01.0", "pci0000:00/0000:00:02.0"] {
            link(&format!("bus/pci/devices/{}", &function[11..]), &format!("devices/{function}"));
        }
        link("class/infiniband/mlx5_0/device", "devices/pci0000:80/0000:81:00.0");
        link("class/infiniband/mlx5_1/device", "devices/pci0000:00/0000:00:02.0");
        link("class/net/eth0/device", "devices/pci0000:00/0000:00:01.0/virtio1");
        file("class/net/veth0/mtu", "1500");
        file("class/infiniband/rxe0/parent", "eth0\n");
        file("class/infiniband/rxe1/parent", "veth0\n");

        let sysfs = Sysfs::new(dir.path()).unwrap();
        assert_eq!(of_nic(&sysfs, "mlx5_0").unwrap(), (16..32).collect::<Vec<_>>());
        assert_eq!(of_nic(&sysfs, "rxe0").unwrap(), [0, 1]);
        for (name, part) in [("rxe1", "veth0"), ("mlx5_1", "local_cpulist"), ("none", "no such RDMA device")] {
            let text = of_nic(&sysfs, name).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(part), "{text}");
        }
    }
}
