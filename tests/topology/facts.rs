//! What is known of functions and bridges, and what is not.

use tokio_rdma::topology::{Acs, Answer, Function, FunctionKind, IommuMode, PcieLink};

use crate::machine::{Machine, address, path};

const GPU: &str = "0000:03:00.0";
const NIC: &str = "0000:04:00.0";
const PORTS: [&str; 2] = ["0000:02:00.0", "0000:02:01.0"];

/// 4096 bytes with one extended capability, at 0x100, whose control register is this.
fn config(capability: u32, control: u16) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[0x100..0x104].copy_from_slice(&(0x0001_0000 | capability).to_le_bytes());
    bytes[0x106..0x108].copy_from_slice(&control.to_le_bytes());
    bytes
}

fn gpu(machine: &Machine) -> Function {
    machine.topology().function(address(GPU)).unwrap().clone()
}

#[test]
fn a_bridge_that_redirects_is_on_the_way_or_not() {
    let machine = Machine::server();
    let redirect = |machine: &Machine, to| path(&machine.topology(), GPU, to).acs_redirect();
    for bridge in ["0000:01:00.0", "0000:02:02.0", PORTS[0], PORTS[1]] {
        machine.attribute(bridge, "config", config(0x0d, 0));
    }
    assert_eq!(redirect(&machine, NIC), Answer::No);
    // Not on the way to this NIC, but to the other one.
    machine.attribute("0000:02:02.0", "config", config(0x0d, 0x1d));
    assert_eq!(redirect(&machine, NIC), Answer::No);
    assert_eq!(redirect(&machine, "0000:07:00.0"), Answer::Yes);
    machine.attribute(PORTS[1], "config", config(0x0d, 0x1d));
    assert_eq!(redirect(&machine, NIC), Answer::Yes);
    let acs = &path(&machine.topology(), GPU, NIC).bridges[2].acs;
    assert_eq!(*acs, Acs::Control(0x1d));
    // A capability of another kind is none.
    machine.attribute(PORTS[1], "config", config(0x0f, 0x1d));
    assert_eq!(redirect(&machine, NIC), Answer::No);
    // Through the host bridge it goes in any case.
    assert_eq!(redirect(&machine, "0000:08:00.0"), Answer::No);
}

#[test]
fn what_only_root_can_see_is_not_known_to_others() {
    let machine = Machine::server();
    for bridge in ["0000:01:00.0", PORTS[0], PORTS[1]] {
        machine.attribute(bridge, "config", [0; 64]);
    }
    machine.attribute(GPU, "config", [0; 64]);
    let answer = path(&machine.topology(), GPU, NIC).acs_redirect();
    assert_eq!(answer.to_string(), "cannot tell (0000:02:00.0: not root: config space ends at 64 bytes)");
    assert_eq!(gpu(&machine).ats, Answer::Unknown("not root: config space ends at 64 bytes".into()));
    // One that is known to redirect is enough.
    machine.attribute(PORTS[1], "config", config(0x0d, 0x04));
    assert_eq!(path(&machine.topology(), GPU, NIC).acs_redirect(), Answer::Yes);
    // And one that is not known is enough not to say no.
    machine.attribute(PORTS[1], "config", config(0x0d, 0));
    assert!(matches!(path(&machine.topology(), GPU, NIC).acs_redirect(), Answer::Unknown(_)));
    // Where the way is not known, nothing is.
    assert!(matches!(path(&machine.topology(), GPU, "0000:c1:00.0").acs_redirect(), Answer::Unknown(_)));
}

#[test]
fn translations_of_a_functions_own() {
    let machine = Machine::server();
    for (bytes, ats) in
        [(config(0x0f, 0x8000), Answer::Yes), (config(0x0f, 0), Answer::No), (config(0x0d, 0x8000), Answer::No)]
    {
        machine.attribute(GPU, "config", bytes);
        assert_eq!(gpu(&machine).ats, ats);
    }
}

#[test]
fn what_the_iommu_does() {
    let machine = Machine::server();
    assert_eq!((gpu(&machine).iommu.group, gpu(&machine).iommu.mode), (None, IommuMode::None));
    let group = "kernel/iommu_groups/17";
    machine
        .tree
        .link(
            format!("devices/{}/iommu_group", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0"),
            group,
        )
        .unwrap();
    assert!(matches!(gpu(&machine).iommu.mode, IommuMode::Unknown(_)));
    for (text, mode) in [
        ("identity\n", IommuMode::Identity),
        ("DMA\n", IommuMode::Translated("DMA".into())),
        ("DMA-FQ\n", IommuMode::Translated("DMA-FQ".into())),
        ("blocked\n", IommuMode::Blocked),
        ("new\n", IommuMode::Unknown("the type of its group 17 is \"new\"".into())),
    ] {
        machine.tree.file(format!("{group}/type"), text).unwrap();
        assert_eq!((gpu(&machine).iommu.group, gpu(&machine).iommu.mode), (Some(17), mode));
    }
}

#[test]
fn what_functions_are() {
    let machine = Machine::server();
    machine.tree.function("pci0000:00/0000:00:03.0", &[("class", "0x030000"), ("vendor", "0x1234")]).unwrap();
    machine.function("pci0000:00/0000:00:04.0", "0x010802", "0");
    machine.function("pci0000:00/0000:00:05.0", "0x120000", "0");
    let topology = machine.topology();
    let kind = |text: &str| topology.function(address(text)).map(|function| function.kind);
    assert_eq!(kind(GPU), Some(FunctionKind::Gpu));
    assert_eq!(kind("0000:00:03.0"), Some(FunctionKind::Display));
    assert_eq!(kind(NIC), Some(FunctionKind::Nic));
    assert_eq!(kind("0000:00:05.0"), Some(FunctionKind::Accelerator));
    assert_eq!(kind("0000:00:04.0"), None);
    assert_eq!(topology.gpus().map(|gpu| gpu.address.to_string()).collect::<Vec<_>>(), [GPU]);
    let gpu = topology.function(address(GPU)).unwrap();
    assert_eq!(
        (gpu.vendor, gpu.device, gpu.class, gpu.numa_node),
        (Some(0x10de), Some(0x2330), Some(0x03_0200), Some(0))
    );
    assert_eq!(gpu.host_bridge.as_deref(), Some("pci0000:00"));
    let above: Vec<_> = gpu.bridges.iter().map(ToString::to_string).collect();
    assert_eq!(above, ["0000:02:00.0", "0000:01:00.0", "0000:00:01.0"]);
    assert!(topology.bridges().any(|bridge| bridge.address == address("0000:02:02.0")));
}

#[test]
fn links_and_cpus() {
    let machine = Machine::server();
    for (name, text) in [
        ("current_link_speed", "8.0 GT/s PCIe\n"),
        ("max_link_speed", "16.0 GT/s PCIe\n"),
        ("current_link_width", "8\n"),
        ("max_link_width", "16\n"),
        ("local_cpulist", "0-1,4\n"),
    ] {
        machine.attribute(GPU, name, text);
    }
    let gpu = gpu(&machine);
    let PcieLink { speed, width, max_speed, max_width, .. } = gpu.link;
    assert_eq!((speed, width, max_speed, max_width), (Some(8_000), Some(8), Some(16_000), Some(16)));
    assert_eq!(gpu.link.is_degraded(), Answer::Yes);
    assert_eq!(gpu.local_cpus, [0, 1, 4]);
}

#[test]
fn garbage_in_files_is_not_known_and_nothing_panics() {
    let machine = Machine::server();
    let garbage: &[&[u8]] =
        &[b"", b"\n", b"\0\0\0", b"\xff\xfe garbage", b"-1", b"99999999999999999999999", b"0x", &[0xff; 5000]];
    for content in garbage {
        for function in [GPU, NIC, PORTS[0]] {
            for name in [
                "vendor",
                "device",
                "numa_node",
                "local_cpulist",
                "current_link_speed",
                "current_link_width",
                "max_link_width",
                "config",
            ] {
                machine.attribute(function, name, content);
            }
        }
        for file in [
            "devices/system/node/has_cpu",
            "devices/system/node/online",
            "class/infiniband/mlx5_0/ports/1/state",
            "class/infiniband/mlx5_0/ports/1/rate",
            "class/infiniband/mlx5_0/ports/x/state",
            "class/infiniband/odd/parent",
            "class/infiniband/mlx5_1/device/net",
        ] {
            let _ = machine.tree.file(file, content);
        }
        let topology = machine.topology();
        let nic = topology.function(address(NIC)).unwrap();
        assert_eq!((nic.vendor, nic.link, nic.local_cpus.len()), (None, PcieLink::default(), 0));
        assert!(topology.nic("mlx5_0").unwrap().unusable().is_some());
        path(&topology, GPU, NIC);
        topology.nics_for(address(GPU));
    }
    // A folder where a file should be, and files where folders should be.
    std::fs::create_dir_all(machine.root().join("bus/pci/devices/0000:41:00.0/current_link_speed")).unwrap();
    machine.tree.file("class/infiniband/file", "x").unwrap();
    machine.tree.file("bus/pci/devices/0000:ff:00.0", "x").unwrap();
    assert!(machine.topology().nic("file").unwrap().function.is_err());
}

#[test]
fn a_tree_without_anything_is_a_machine_without_anything() {
    let machine = Machine::new();
    assert_eq!(machine.topology().functions().count() + machine.topology().nics().len(), 0);
    let error = tokio_rdma::topology::Topology::read_from(machine.root().join("none")).unwrap_err().to_string();
    assert!(error.contains("none"), "{error}");
    assert!(tokio_rdma::topology::Topology::read().is_ok());
}
