//! Dumps of real machines, and small ones that are made here.

use std::io::Write;
use std::path::{Path, PathBuf};

use tokio_rdma::topology::{FunctionKind, Level, PciAddress, Topology};

use crate::dump;
use crate::machine::{address, folder};

fn read(xml: &str) -> (tempfile::TempDir, Topology) {
    let dir = folder();
    dump::write(xml, dir.path()).unwrap();
    let topology = Topology::read_from(dir.path()).unwrap();
    (dir, topology)
}

/// How many NICs of each level a GPU has, as in `PIX 4, NODE 12`.
fn counts(topology: &Topology, gpu: PciAddress) -> String {
    let levels: Vec<_> = topology.nics().iter().map(|nic| topology.path_to_nic(gpu, nic).level).collect();
    let count = |level: &Level| levels.iter().filter(|it| *it == level).count();
    let counts = Level::ALL.iter().map(|level| (level, count(level))).filter(|(_, count)| *count > 0);
    counts.map(|(level, count)| format!("{level} {count}")).collect::<Vec<_>>().join(", ")
}

const HWLOC: &str = r#"<?xml version="1.0"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" cpuset="0x000000ff" nodeset="0x00000003">
  <object type="Package" cpuset="0x0000000f" nodeset="0x00000001">
   <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x00000001"/>
   <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">
    <object type="Bridge" bridge_type="1-1" pci_busid="0000:10:00.0" pci_type="0604 [1000:c030] [0000:0000] 00">
     <object type="Bridge" bridge_type="1-1" pci_busid="0000:11:00.0" pci_type="0604 [1000:c030] [0000:0000] 00">
      <object type="Bridge" bridge_type="1-1" pci_busid="0000:12:00.0" pci_type="0604 [1000:c030] [0000:0000] 00">
       <object type="PCIDev" pci_busid="0000:13:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1" pci_link_speed="63.015385"/>
      </object>
      <object type="Bridge" bridge_type="1-1" pci_busid="0000:12:01.0" pci_type="0604 [1000:c030] [0000:0000] 00">
       <object type="PCIDev" pci_busid="0000:14:00.0" pci_type="0207 [15b3:1021] [15b3:0041] 00" pci_link_speed="31.507692">
        <object type="OSDev" name="ib0" osdev_type="2"/>
        <object type="OSDev" name="mlx5_0" osdev_type="3"><info name="Port1State" value="4"/><info name="Port2State" value="1"/></object>
       </object>
      </object>
     </object>
    </object>
   </object>
  </object>
  <object type="Package" cpuset="0x000000f0" nodeset="0x00000002">
   <object type="NUMANode" os_index="1" cpuset="0x000000f0" nodeset="0x00000002"/>
   <object type="Bridge" bridge_type="0-1" bridge_pci="0001:[80-80]">
    <object type="PCIDev" pci_busid="0001:80:01.0" pci_type="0200 [1d0f:efa1] [1d0f:efa1] 00">
     <object type="OSDev" name="rdmap128s1" osdev_type="3"/>
    </object>
   </object>
  </object>
  <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-00]">
   <object type="PCIDev" pci_busid="0000:00:03.0" pci_type="0300 [1d0f:1111] [0000:0000] 00"/>
  </object>
 </object>
</topology>"#;

#[test]
fn a_dump_of_hwloc() {
    let (_dir, topology) = read(HWLOC);
    let gpu = topology.gpus().next().unwrap();
    assert_eq!((gpu.address, gpu.numa_node), (address("0000:13:00.0"), Some(0)));
    assert_eq!((gpu.local_cpus.as_slice(), gpu.device), (&[0, 1, 2, 3][..], Some(0x2330)));
    assert_eq!((gpu.link.speed, gpu.link.width), (Some(32_000), Some(16)));
    assert_eq!(counts(&topology, gpu.address), "PIX 1, SYS 1");
    let nic = topology.nic("mlx5_0").unwrap();
    assert_eq!(nic.ports.iter().map(|port| port.is_active()).collect::<Vec<_>>(), [true, false]);
    assert_eq!(topology.level(address("0000:13:00.0"), address("0000:00:03.0")), Level::Unknown);
    assert_eq!(topology.function(address("0000:00:03.0")).unwrap().kind, FunctionKind::Display);
}

#[test]
fn versions_of_hwloc_differ() {
    // Version 1 nests what is of a node in the node, version 3 has masks for types.
    let first = r#"<topology><object type="Machine" nodeset="0x3"><object type="NUMANode" os_index="1" cpuset="0xf0" nodeset="0x2">
        <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-03]"><object type="PCIDev" pci_busid="0000:00:02.0" pci_type="0302 [10de:1db1] [0000:0000] a1"/>
        <object type="PCIDev" pci_busid="0000:00:03.0" pci_type="0207 [15b3:1017] [0000:0000] 00"><object type="OSDev" name="mlx5_0" osdev_type="3"/></object>
        </object></object></object></topology>"#;
    let third =
        first.replace("<topology>", r#"<topology version="3.0">"#).replace(r#"osdev_type="3""#, r#"osdev_type="32""#);
    for xml in [first, &third] {
        let (_dir, topology) = read(xml);
        let gpu = topology.gpus().next().unwrap();
        assert_eq!(gpu.numa_node, Some(1));
        assert_eq!(counts(&topology, gpu.address), "PHB 1");
    }
    for (other, what) in [("3", "a disk with memory"), ("16", "a network interface")] {
        let xml = third.replace(r#"osdev_type="32""#, &format!(r#"osdev_type="{other}""#));
        assert!(read(&xml).1.nics().is_empty(), "{other} is {what}");
    }
}

#[test]
fn a_dump_without_bridges_shows_no_way() {
    let xml = r#"<topology version="2.0"><object type="Machine" nodeset="0x1">
        <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2330] [0000:0000] a1"/>
        <object type="PCIDev" pci_busid="0000:02:00.0" pci_type="0207 [15b3:1021] [0000:0000] 00"><object type="OSDev" name="mlx5_0" subtype="OpenFabrics"/></object>
        </object></topology>"#;
    let (_dir, topology) = read(xml);
    assert_eq!(counts(&topology, address("0000:01:00.0")), "unknown 1");
}

#[test]
fn a_dump_of_nccl() {
    let (_dir, topology) = read(
        r#"<system version="1">
        <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64">
          <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
            <pci busid="0000:11:00.0" class="0x060400">
              <pci busid="0000:12:00.0" vendor="0x10de"><gpu dev="0" sm="90"/></pci>
              <pci busid="0000:13:00.0" class="0x020700"><nic>
                <net name="mlx5_0" dev="0" speed="400000" port="1"/><net name="mlx5_0" dev="1" speed="200000" port="2"/></nic></pci>
            </pci>
            <pci busid="0000:14:00.0" class="0x020000"><nic><net name="mlx5_1" speed="100000" port="1"/></nic></pci>
          </pci>
          <pci busid="0000:20:00.0" class="0x020000"><nic><net name="mlx5_2"/></nic></pci>
          <nic><net name="rxe0" dev="7"/></nic>
        </cpu>
        <cpu numaid="1" affinity="ffff0000"><pci busid="0000:80:00.0" class="0x020000"><nic><net name="mlx5_3"/></nic></pci>
          <pci busid="0000:90:00.0" class="0x038000"><gpu dev="1" gcn="908"/></pci></cpu>
        </system>"#,
    );
    let gpu = topology.gpus().next().unwrap();
    assert_eq!((gpu.address, gpu.numa_node, gpu.local_cpus.len()), (address("0000:12:00.0"), Some(0), 16));
    let levels =
        topology.nics().iter().map(|nic| format!("{} {}", nic.name, topology.path_to_nic(gpu.address, nic).level));
    assert_eq!(levels.collect::<Vec<_>>(), ["mlx5_0 PIX", "mlx5_1 PXB", "mlx5_2 PHB", "mlx5_3 SYS", "rxe0 unknown"]);
    assert_eq!(topology.nic("mlx5_0").unwrap().megabits(), Some(400_000));
    assert_eq!(topology.nic("mlx5_0").unwrap().ports.len(), 2);
    assert_eq!(topology.function(address("0000:90:00.0")).unwrap().kind, FunctionKind::Display);
}

#[test]
fn a_table_that_a_vendor_wrote_for_nccl() {
    // A domain for each device, bridges that there are not, and NICs without names.
    let (_dir, topology) = read(
        r#"<system version="1"><cpu numaid="0" affinity="ffff">
          <pci busid="ffff:ff:01.0" class="0x060400"><pci busid="0001:00:00.0" class="0x030200"/><pci busid="0101:00:00.0" class="0x020700"/></pci>
          <pci busid="ffff:ff:02.0" class="0x060400"><pci busid="0002:00:00.0" class="0x030200"/><pci busid="0102:00:00.0" class="0x020700"/></pci>
        </cpu><cpu numaid="1" affinity="ffff0000">
          <pci busid="ffff:ff:03.0" class="0x060400"><pci busid="0003:00:00.0" class="0x030200"/><pci busid="0103:00:00.0" class="0x020700"/></pci>
        </cpu></system>"#,
    );
    let found: Vec<_> = topology.gpus().map(|gpu| counts(&topology, gpu.address)).collect();
    assert_eq!(found, ["PIX 1, PHB 1, SYS 1", "PIX 1, PHB 1, SYS 1", "PIX 1, SYS 2"]);
    assert_eq!(topology.nics_for(address("0002:00:00.0")).usable[0].name, "0102:00:00.0");
}

#[test]
fn what_is_no_dump_is_an_error() {
    let dir = folder();
    for (xml, part) in [
        ("", "not XML"),
        ("<html/>", "<html>"),
        ("<topology/>", "no PCI device"),
        ("<system><cpu><pci/></cpu></system>", "no PCI device"),
        ("<topology><object", "not XML"),
        (&format!("{}{}", "<topology>".repeat(100_000), "</topology>".repeat(100_000)), ""),
        (&format!("{}{}", "<topology>".repeat(1000), "</topology>".repeat(1000)), "deep"),
    ] {
        let error = format!("{:#}", dump::write(xml, dir.path()).unwrap_err());
        assert!(error.contains(part), "{xml:?}: {error}");
    }
}

/// Where dumps of real machines are, if they are.
fn real() -> Option<PathBuf> {
    let named = std::env::var_os("TOKIO_RDMA_TEST_TOPOLOGIES").map(PathBuf::from);
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/topology");
    let dir = named.unwrap_or_else(beside);
    if dir.is_dir() {
        return Some(dir);
    }
    skip("TOKIO_RDMA_TEST_TOPOLOGIES names no folder with dumps of real machines");
    None
}

#[test]
fn real_machines_are_as_their_makers_say() {
    let Some(dir) = real() else { return };
    let mut checked = 0;
    for (file, gpus, expected) in [
        ("nixl-p5.48xl.xml", 8, "PIX 4, NODE 12, SYS 16"),
        ("nixl-p6-b200.48xl.xml", 8, "PIX 2, NODE 2, SYS 6|PIX 2, NODE 4, SYS 4|PIX 4, NODE 2, SYS 4"),
        ("nixl-p4d.24xl.xml", 8, "PHB 1, NODE 1, SYS 2"),
        // The hypervisor shows one bus, with everything on it.
        ("nixl-g5.48xl.xml", 8, "PHB 1"),
        ("nixl-p3dn.24xl.xml", 8, "PHB 1"),
    ] {
        let Ok(xml) = std::fs::read_to_string(dir.join(file)) else { continue };
        let (_dir, topology) = read(&xml);
        assert_eq!(topology.gpus().count(), gpus, "{file}");
        for gpu in topology.gpus() {
            let found = counts(&topology, gpu.address);
            assert!(expected.split('|').any(|counts| counts == found), "{file}, {}: {found}", gpu.address);
        }
        checked += 1;
    }
    if checked == 0 {
        skip(&format!("{} has none of the known dumps", dir.display()));
    }
}

#[test]
fn each_gpu_of_a_real_machine_has_its_share() {
    let Some(dir) = real() else { return };
    for (file, users) in [("nixl-p5.48xl.xml", 1), ("nixl-p6-b200.48xl.xml", 1), ("nixl-p4d.24xl.xml", 2)] {
        let Ok(xml) = std::fs::read_to_string(dir.join(file)) else { continue };
        let (_dir, topology) = read(&xml);
        let mut first: Vec<_> =
            topology.gpus().map(|gpu| topology.nics_for(gpu.address).usable[0].name.clone()).collect();
        first.sort();
        for nic in &first {
            assert_eq!(first.iter().filter(|it| *it == nic).count(), users, "{file}: {first:?}");
        }
    }
}

#[test]
fn every_dump_in_the_folder_is_read() {
    let Some(dir) = real() else { return };
    let mut dumps = 0;
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "xml") {
            continue;
        }
        let tree = folder();
        // A folder may hold XML of other kinds, and dumps that were made without devices.
        if let Err(error) = dump::write(&std::fs::read_to_string(&path).unwrap(), tree.path()) {
            skip(&format!("{}: {error:#}", path.display()));
            continue;
        }
        let topology = Topology::read_from(tree.path()).unwrap();
        let graphics = topology.functions().filter(|function| function.kind != FunctionKind::Nic);
        for gpu in graphics.map(|function| function.address).collect::<Vec<_>>() {
            let ranking = topology.nics_for(gpu);
            assert_eq!(ranking.usable.len() + ranking.left_out.len(), topology.nics().len(), "{}", path.display());
        }
        dumps += 1;
    }
    assert!(dumps > 0, "{} has no dump", dir.display());
}

/// Not by `println!`, which the harness keeps to itself where a test passes.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
