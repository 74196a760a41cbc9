//! Levels, and their corner cases.

use tokio_rdma::topology::{Answer, Level};

use crate::machine::{Machine, address, path};

const GPU: &str = "0000:03:00.0";

#[test]
fn each_level_on_one_machine() {
    let topology = Machine::server().topology();
    for (nic, level, bridges) in [
        ("0000:04:00.0", Level::Pix, "0000:02:00.0 0000:01:00.0 0000:02:01.0"),
        ("0000:07:00.0", Level::Pxb, "0000:02:00.0 0000:01:00.0 0000:02:02.0 0000:05:00.0 0000:06:00.0"),
        ("0000:08:00.0", Level::Phb, "0000:02:00.0 0000:01:00.0 0000:00:01.0 0000:00:02.0"),
        ("0000:41:00.0", Level::Node, "0000:02:00.0 0000:01:00.0 0000:00:01.0 0000:40:01.0"),
        ("0000:81:00.0", Level::Sys, "0000:02:00.0 0000:01:00.0 0000:00:01.0 0000:80:01.0"),
        ("0000:c1:00.0", Level::Unknown, "0000:02:00.0 0000:01:00.0 0000:00:01.0 0000:c0:01.0"),
    ] {
        let path = path(&topology, GPU, nic);
        assert_eq!(path.level, level, "{nic}: {}", path.why);
        let passed: Vec<_> = path.bridges.iter().map(|bridge| bridge.address.to_string()).collect();
        assert_eq!(passed.join(" "), bridges, "{nic}");
        assert_eq!(path.common.map(|common| common == address("0000:01:00.0")), (level <= Level::Pxb).then_some(true));
        assert_eq!(path.overridden, None);
    }
}

#[test]
fn why_is_told() {
    let topology = Machine::server().topology();
    for (nic, parts) in [
        ("0000:04:00.0", &["0000:01:00.0", "switches on the way: 1"][..]),
        ("0000:07:00.0", &["0000:01:00.0", "switches on the way: 2"]),
        ("0000:08:00.0", &["pci0000:00"]),
        ("0000:41:00.0", &["pci0000:00", "pci0000:40", "NUMA node 0"]),
        ("0000:81:00.0", &["pci0000:80", "NUMA nodes 0 and 1"]),
        ("0000:c1:00.0", &["pci0000:c0", "0000:c1:00.0"]),
        ("0000:ee:00.0", &["no function 0000:ee:00.0"]),
    ] {
        let path = path(&topology, GPU, nic);
        parts.iter().for_each(|part| assert!(path.why.contains(part), "{part:?} is not in {:?}", path.why));
    }
}

#[test]
fn functions_of_one_device_and_on_one_bus() {
    let machine = Machine::new();
    machine.nodes("0", "0");
    machine.function("pci0000:00/0000:00:01.0", "0x060400", "0");
    machine.function("pci0000:00/0000:00:01.0/0000:01:00.2/0000:02:00.0", "0x060400", "0");
    for place in [
        // On the root bus, so that no bridge is above them.
        "pci0000:00/0000:00:1f.0",
        "pci0000:00/0000:00:1f.3",
        "pci0000:00/0000:00:1e.0",
        // Below a root port: a NIC of two functions, and virtual functions on other device numbers.
        "pci0000:00/0000:00:01.0/0000:01:00.0",
        "pci0000:00/0000:00:01.0/0000:01:00.1",
        "pci0000:00/0000:00:01.0/0000:01:02.5",
        // A NIC with a switch in it: a function of its own beside the upstream port.
        "pci0000:00/0000:00:01.0/0000:01:00.2/0000:02:00.0/0000:03:00.0",
        // The same again: two switches between them.
        "pci0000:00/0000:00:01.0/0000:01:00.3/0000:04:00.0/0000:05:00.0",
    ] {
        machine.function(place, "0x020000", "0");
    }
    let topology = machine.topology();
    for (a, b, level) in [
        ("0000:00:1f.0", "0000:00:1f.0", Level::Pix),
        ("0000:00:1f.0", "0000:00:1f.3", Level::Pix),
        ("0000:00:1f.0", "0000:00:1e.0", Level::Phb),
        ("0000:01:00.0", "0000:01:00.1", Level::Pix),
        ("0000:01:00.0", "0000:01:02.5", Level::Pix),
        ("0000:01:00.0", "0000:03:00.0", Level::Pix),
        ("0000:03:00.0", "0000:05:00.0", Level::Pxb),
        ("0000:00:01.0", "0000:03:00.0", Level::Pix),
        ("0000:02:00.0", "0000:03:00.0", Level::Pix),
    ] {
        let path = path(&topology, a, b);
        assert_eq!(path.level, level, "{a} and {b}: {}", path.why);
    }
    for same in ["0000:01:00.0", "0000:00:1f.0"] {
        let path = path(&topology, same, same);
        assert_eq!((path.bridges.len(), path.common, path.acs_redirect()), (0, None, Answer::No));
    }
    let one_device = path(&topology, "0000:00:1f.0", "0000:00:1f.3");
    assert_eq!((one_device.bridges.len(), one_device.acs_redirect()), (0, Answer::No));
}

/// Two functions below host bridges of their own, with this `numa_node` each, or without that file.
fn two(nodes: [Option<&str>; 2], online: Option<(&str, &str)>) -> Level {
    let machine = Machine::new();
    if let Some((online, with_cpus)) = online {
        machine.nodes(online, with_cpus);
    }
    for (place, node) in ["pci0000:00/0000:01:00.0", "pci0000:80/0000:81:00.0"].into_iter().zip(nodes) {
        let attributes: Vec<_> = node.map(|node| ("numa_node", node)).into_iter().collect();
        machine.tree.function(place, &attributes).unwrap();
    }
    path(&machine.topology(), "0000:01:00.0", "0000:81:00.0").level
}

#[test]
fn nodes_that_are_not_known() {
    let (one, two_nodes) = (Some(("0", "0")), Some(("0-1", "0-1")));
    for (nodes, online, level) in [
        ([Some("0"), Some("0")], two_nodes, Level::Node),
        ([Some("0"), Some("1")], two_nodes, Level::Sys),
        ([Some("-1"), Some("0")], two_nodes, Level::Unknown),
        ([Some("-1"), Some("-1")], two_nodes, Level::Unknown),
        ([None, Some("1")], two_nodes, Level::Unknown),
        ([Some("-1"), Some("-1")], one, Level::Node),
        ([Some("-1"), Some("0")], one, Level::Node),
        ([None, None], one, Level::Node),
        // Memory of GPUs is nodes without CPUs.
        ([Some("-1"), Some("-1")], Some(("0,2-9", "0")), Level::Node),
        ([Some("0"), Some("1")], Some(("0-1", "0")), Level::Sys),
        // A kernel without NUMA says nothing, also on two sockets.
        ([None, None], None, Level::Unknown),
        ([Some("0"), Some("0")], None, Level::Node),
        ([Some("garbage"), Some("0")], two_nodes, Level::Unknown),
        ([Some("-1"), Some("-1")], Some(("x", "y")), Level::Unknown),
    ] {
        assert_eq!(two(nodes, online), level, "{nodes:?} of {online:?}");
    }
}

#[test]
fn one_host_bridge_is_phb_whatever_the_nodes_say() {
    let machine = Machine::new();
    machine.nodes("0-1", "0-1");
    machine.function("pci0000:00/0000:00:01.0/0000:01:00.0", "0x030200", "-1");
    machine.function("pci0000:00/0000:00:02.0/0000:02:00.0", "0x020000", "1");
    assert_eq!(path(&machine.topology(), "0000:01:00.0", "0000:02:00.0").level, Level::Phb);
}

#[test]
fn domains_may_be_wide_and_behind_another_device() {
    let machine = Machine::new();
    machine.nodes("0-1", "0-1");
    let controller = "pci0000:00/0000:00:0e.0";
    machine.function(controller, "0x010400", "0");
    machine.function(&format!("{controller}/pci10000:e0/10000:e0:06.0/10000:e1:00.0"), "0x010802", "0");
    machine.function(&format!("{controller}/pci10000:e0/10000:e0:06.0/10000:e1:00.1"), "0x010802", "0");
    machine.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", "0");
    let topology = machine.topology();
    assert_eq!(path(&topology, "10000:e1:00.0", "10000:e1:00.1").level, Level::Pix);
    assert_eq!(path(&topology, "10000:e1:00.0", "0000:01:00.0").level, Level::Node);
}
