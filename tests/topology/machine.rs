//! A machine made of files.

use std::path::Path;

use tokio_rdma::topology::{PciAddress, PciPath, Topology};

use crate::dump::Tree;

pub struct Machine {
    dir: tempfile::TempDir,
    pub tree: Tree,
}

pub fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// In memory where that is possible: hundreds of small files take a disk seconds.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Machine {
    pub fn new() -> Self {
        let dir = folder();
        Self { tree: Tree::new(dir.path()), dir }
    }

    /// Two sockets. Below `pci0000:00`, a switch with a GPU, a NIC, and a switch with another NIC, and a root port with a third one; one
    /// NIC each below another host bridge of the node, one of the other node, and one of no known node.
    pub fn server() -> Self {
        let this = Self::new();
        this.nodes("0-1", "0-1");
        for bridge in [
            "pci0000:00/0000:00:01.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0/0000:06:00.0",
            "pci0000:00/0000:00:02.0",
            "pci0000:40/0000:40:01.0",
            "pci0000:80/0000:80:01.0",
            "pci0000:c0/0000:c0:01.0",
        ] {
            let node = if bridge.starts_with("pci0000:80") { "1" } else { "0" };
            this.function(bridge, "0x060400", node);
        }
        this.gpu("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", "0");
        for (name, place, node) in [
            ("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", "0"),
            ("mlx5_1", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0", "0"),
            ("mlx5_2", "pci0000:00/0000:00:02.0/0000:08:00.0", "0"),
            ("mlx5_3", "pci0000:40/0000:40:01.0/0000:41:00.0", "0"),
            ("mlx5_4", "pci0000:80/0000:80:01.0/0000:81:00.0", "1"),
            ("mlx5_5", "pci0000:c0/0000:c0:01.0/0000:c1:00.0", "-1"),
        ] {
            this.nic(name, place, node);
        }
        this
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn topology(&self) -> Topology {
        Topology::read_from(self.root()).unwrap()
    }

    pub fn nodes(&self, online: &str, with_cpus: &str) {
        self.tree.file("devices/system/node/online", online).unwrap();
        self.tree.file("devices/system/node/has_cpu", with_cpus).unwrap();
    }

    pub fn function(&self, place: &str, class: &str, node: &str) {
        self.tree.function(place, &[("class", class), ("numa_node", node)]).unwrap();
    }

    pub fn gpu(&self, place: &str, node: &str) {
        let attributes = [("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2330"), ("numa_node", node)];
        self.tree.function(place, &attributes).unwrap();
    }

    /// A NIC with one port that is up.
    pub fn nic(&self, name: &str, place: &str, node: &str) {
        let attributes = [("class", "0x020700"), ("vendor", "0x15b3"), ("numa_node", node)];
        self.tree.function(place, &attributes).unwrap();
        self.tree.nic(name, place.rsplit('/').next()).unwrap();
        self.tree.port(name, 1, "4: ACTIVE", Some("400 Gb/sec (4X NDR)")).unwrap();
    }

    /// A file of the function.
    pub fn attribute(&self, function: &str, name: &str, content: impl AsRef<[u8]>) {
        self.tree.file(format!("bus/pci/devices/{function}/{name}"), content).unwrap();
    }
}

/// The way between two functions; it must be the same in both directions.
pub fn path(topology: &Topology, a: &str, b: &str) -> PciPath {
    let (there, back) = (topology.path(address(a), address(b)), topology.path(address(b), address(a)));
    assert_eq!((there.level, there.common), (back.level, back.common), "{a} and {b}");
    assert!(there.bridges.iter().rev().eq(&back.bridges), "{a} and {b}");
    assert_eq!(topology.level(address(a), address(b)), there.level);
    there
}
