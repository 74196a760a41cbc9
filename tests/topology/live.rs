//! The kernel's own sysfs, in a virtual machine whose PCIe tree is known: `xtask/src/guest/topology.rs` has a picture of it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use tokio_rdma::topology::{Acs, Answer, FunctionKind, IommuMode, Level, Nic, PciAddress, Topology};
use tokio_rdma::{Device, Provider};

use crate::machine::path;

/// What is where: the slot's number, the function, and what the tree is built of.
const GPUS: [(u32, u8); 3] = [(3, 0), (6, 0), (8, 0)];
const NICS: [(u32, u8); 5] = [(2, 0), (5, 0), (6, 1), (7, 0), (9, 0)];

const UNPRIVILEGED: &str = "TOKIO_RDMA_TEST_UNPRIVILEGED";

/// The function in a slot, as the kernel's hotplug driver has it, which knows slots by what the ports say and not by the tree.
fn at((slot, function): (u32, u8)) -> PciAddress {
    let device = fs::read_to_string(format!("/sys/bus/pci/slots/{slot}/address")).unwrap();
    format!("{}.{function}", device.trim()).parse().unwrap()
}

fn nic(topology: &Topology, place: (u32, u8)) -> &Nic {
    topology.nics().iter().find(|nic| nic.function == Ok(at(place))).unwrap()
}

fn expected(a: u32, b: u32) -> Level {
    match (a.min(b), a.max(b)) {
        (a, b) if a == b => Level::Pix,
        (2, 3) => Level::Pix,
        (2 | 3, 5) => Level::Pxb,
        (2 | 3 | 5, 6) => Level::Phb,
        (8, 9) => Level::Node,
        (7, 8 | 9) => Level::Sys,
        // The first host bridge is of no node.
        _ => Level::Unknown,
    }
}

fn check_levels(topology: &Topology) {
    for a in GPUS.into_iter().chain(NICS) {
        for b in GPUS.into_iter().chain(NICS) {
            let path = path(topology, &at(a).to_string(), &at(b).to_string());
            assert_eq!(path.level, expected(a.0, b.0), "slots {a:?} and {b:?}: {}", path.why);
        }
    }
}

/// What the kernel was told, as its groups of functions have it.
fn iommu() -> IommuMode {
    match std::env::var("TOKIO_RDMA_TEST_IOMMU").as_deref() {
        Ok("none") => IommuMode::None,
        Ok("identity") => IommuMode::Identity,
        Ok(kind) => IommuMode::Translated(kind.to_owned()),
        Err(_) => panic!("TOKIO_RDMA_TEST_IOMMU=none, identity or DMA-FQ"),
    }
}

#[test]
#[ignore = "needs a machine with a known PCIe tree: cargo xtask guest topology"]
fn levels_and_nodes_are_as_built() {
    let topology = Topology::read().unwrap();
    check_levels(&topology);
    for place in GPUS.into_iter().chain(NICS) {
        let function = topology.function(at(place)).unwrap();
        let (node, cpus): (_, &[usize]) = match place.0 {
            7 => (Some(1), &[1]),
            8 | 9 => (Some(0), &[0]),
            _ => (None, &[0, 1]),
        };
        assert_eq!((function.numa_node, function.local_cpus.as_slice()), (node, cpus), "{place:?}");
        let kind = if GPUS.contains(&place) { FunctionKind::Display } else { FunctionKind::Nic };
        assert_eq!(function.kind, kind, "{place:?}");
    }
    assert_eq!(topology.functions().count(), GPUS.len() + NICS.len());
}

#[test]
#[ignore = "needs a machine with a known PCIe tree: cargo xtask guest topology"]
fn bridges_redirect_where_the_kernel_told_them_to() {
    let topology = Topology::read().unwrap();
    let with_iommu = iommu() != IommuMode::None;
    let roots: Vec<_> = topology.functions().filter_map(|function| function.bridges.last().copied()).collect();
    assert_eq!(topology.bridges().count(), 11);
    for bridge in topology.bridges() {
        // QEMU's switches have no such capability, its root ports do. The kernel sets it for each group of its IOMMU.
        match &bridge.acs {
            Acs::Control(_) if roots.contains(&bridge.address) => {
                assert_eq!(bridge.acs.redirects(), with_iommu.into(), "{bridge:?}");
            }
            Acs::Absent => assert!(!roots.contains(&bridge.address), "{bridge:?}"),
            acs => panic!("{}: {acs:?}", bridge.address),
        }
    }
    // Below a switch, and below a root port.
    assert_eq!(topology.path(at((3, 0)), at((2, 0))).acs_redirect(), Answer::No);
    assert_eq!(topology.path(at((6, 0)), at((6, 1))).acs_redirect(), with_iommu.into());
    for function in topology.functions() {
        assert_eq!(
            (&function.iommu.mode, function.iommu.group.is_some()),
            (&iommu(), with_iommu),
            "{}",
            function.address
        );
        assert_eq!(function.ats, Answer::No);
    }
}

#[test]
#[ignore = "needs a machine with a known PCIe tree: cargo xtask guest topology"]
fn software_devices_are_where_their_carriers_are() {
    let topology = Topology::read().unwrap();
    for place in NICS {
        let nic = nic(&topology, place);
        let parent = nic.parent.as_deref().unwrap();
        let device = fs::canonicalize(format!("/sys/class/net/{parent}/device")).unwrap();
        assert!(device.to_str().unwrap().contains(&format!("/{}/", at(place))), "{place:?}: {}", device.display());
        assert_eq!(nic.unusable(), None);
    }
    for (name, veth) in [("rxe0", "veth0"), ("rxe1", "veth1")] {
        let nic = topology.nic(name).unwrap();
        assert!(nic.function.as_ref().unwrap_err().contains(veth), "{nic:?}");
    }
}

#[test]
#[ignore = "needs a machine with a known PCIe tree: cargo xtask guest topology"]
fn the_nearest_is_opened_and_threads_run_near_it() {
    let topology = Topology::read().unwrap();
    for (gpu, nearest) in [((3, 0), (2, 0)), ((6, 0), (6, 1)), ((8, 0), (9, 0))] {
        let device = Device::open_near_function(at(gpu)).unwrap();
        assert_eq!((device.name(), device.provider()), (nic(&topology, nearest).name.as_str(), Provider::Verbs));
    }
    let device = Device::open_near_function(at((7, 0))).unwrap();
    assert_eq!(device.local_cpus().unwrap(), [1]);
    let allowed = || {
        let set = rustix::thread::sched_getaffinity(None).unwrap();
        (0..2).filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>()
    };
    let pinned = std::thread::spawn(move || device.pin_this_thread().map(|()| allowed())).join().unwrap();
    assert_eq!(pinned.unwrap(), [1]);
    assert_eq!(allowed(), [0, 1]);
    // Of veth nothing is known, and no CPU is near it.
    let error = Device::open("rxe0").unwrap().pin_this_thread().unwrap_err().to_string();
    assert!(error.contains("veth0"), "{error}");
}

#[test]
#[ignore = "needs a machine with a known PCIe tree: cargo xtask guest topology"]
fn others_than_root_see_the_same_levels_and_no_acs() {
    if std::env::var_os(UNPRIVILEGED).is_none() {
        let this = std::env::current_exe().unwrap();
        let name = "live::others_than_root_see_the_same_levels_and_no_acs";
        let mut child = Command::new(this);
        child.args([name, "--exact", "--ignored", "--nocapture"]).env(UNPRIVILEGED, "1").uid(65534).gid(65534);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
        return;
    }
    let topology = Topology::read().unwrap();
    check_levels(&topology);
    for bridge in topology.bridges() {
        assert_eq!(bridge.acs, Acs::Unknown("not root: config space ends at 64 bytes".into()), "{}", bridge.address);
    }
    assert!(matches!(topology.path(at((6, 0)), at((6, 1))).acs_redirect(), Answer::Unknown(_)));
    assert!(topology.functions().all(|function| function.iommu.mode == iommu()));
}
