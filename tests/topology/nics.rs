//! RDMA devices: of a function, of a network interface, of nothing.

use tokio_rdma::topology::Level;
use tokio_rdma::{Device, Error, Provider};

use crate::machine::{Machine, address};

const VIRTIO: &str = "pci0000:00/0000:00:02.0/0000:08:00.0/virtio1";

#[test]
fn ports_are_as_the_kernel_says() {
    let machine = Machine::server();
    machine.tree.port("mlx5_0", 2, "1: DOWN", Some("40 Gb/sec (4X QDR)")).unwrap();
    machine.tree.file("class/infiniband/mlx5_0/ports/2/phys_state", "3: Disabled\n").unwrap();
    machine.tree.file("class/infiniband/mlx5_0/ports/2/link_layer", "Ethernet\n").unwrap();
    let topology = machine.topology();
    let nic = topology.nic("mlx5_0").unwrap();
    assert_eq!(nic.ports.iter().map(|port| port.number).collect::<Vec<_>>(), [1, 2]);
    let down = &nic.ports[1];
    assert_eq!(down.physical_state.as_deref(), Some("Disabled"));
    assert_eq!(
        (down.state.as_deref(), down.link_layer.as_deref(), down.megabits),
        (Some("DOWN"), Some("Ethernet"), Some(40_000))
    );
    assert!(nic.ports[0].is_active() && !down.is_active());
    assert_eq!((nic.unusable(), nic.megabits()), (None, Some(400_000)));
    machine.tree.port("mlx5_0", 1, "2: INIT", None).unwrap();
    let why = machine.topology().nic("mlx5_0").unwrap().unusable().unwrap();
    assert_eq!(why, "port 1 is INIT, port 2 is DOWN");
}

#[test]
fn a_software_device_is_where_its_carrier_is() {
    let machine = Machine::server();
    machine.tree.file(format!("devices/{VIRTIO}/net/eth0/mtu"), "1500").unwrap();
    machine.tree.link("class/net/eth0/device", &format!("devices/{VIRTIO}")).unwrap();
    machine.tree.file("class/net/veth0/mtu", "1500").unwrap();
    machine.tree.link("class/net/vlan7/lower_eth0", "class/net/eth0").unwrap();
    for (name, carrier) in
        [("rxe0", "eth0"), ("rxe1", "veth0"), ("rxe2", "vlan7"), ("rxe3", "gone"), ("rxe4", "../../../etc")]
    {
        machine.tree.file(format!("class/infiniband/{name}/parent"), format!("{carrier}\n")).unwrap();
        machine.tree.port(name, 1, "4: ACTIVE", Some("800 Gb/sec")).unwrap();
    }
    machine.tree.file("class/infiniband/siw0/ports/1/gid_attrs/ndevs/0", "eth0\n").unwrap();
    let topology = machine.topology();
    for (name, carrier) in [("rxe0", "eth0"), ("rxe2", "vlan7"), ("siw0", "eth0")] {
        let nic = topology.nic(name).unwrap();
        assert_eq!(
            (nic.function.clone(), nic.parent.as_deref()),
            (Ok(address("0000:08:00.0")), Some(carrier)),
            "{name}"
        );
        assert_eq!(topology.path_to_nic(address("0000:03:00.0"), nic).level, Level::Phb);
    }
    for (name, part) in [("rxe1", "veth0"), ("rxe3", "gone"), ("rxe4", "which network interface")] {
        let nic = topology.nic(name).unwrap();
        assert!(nic.function.as_ref().unwrap_err().contains(part), "{nic:?}");
        let path = topology.path_to_nic(address("0000:03:00.0"), nic);
        assert!(path.level == Level::Unknown && path.why.contains(name), "{}", path.why);
    }
    // As near as the hardware NIC, and by its word faster, but behind it.
    let ranked: Vec<_> = topology.nics_for(address("0000:03:00.0")).usable.into_iter().map(|nic| nic.name).collect();
    let place = |name: &str| ranked.iter().position(|it| it == name).unwrap();
    assert!(place("mlx5_2") < place("rxe0") && place("rxe0") < place("mlx5_3"), "{ranked:?}");
}

#[test]
fn links_that_lead_nowhere() {
    let machine = Machine::server();
    machine.tree.nic("mlx5_9", Some("0000:ee:00.0")).unwrap();
    machine.tree.link("bus/pci/devices/0000:ef:00.0", "devices/pci0000:e0/0000:ef:00.0").unwrap();
    machine.tree.link("bus/pci/devices/0000:f0:00.0", "../../etc").unwrap();
    machine.tree.link("bus/pci/devices/0000:f1:00.0", "bus/pci/devices/0000:04:00.0").unwrap();
    machine.tree.link("class/infiniband/mlx5_8/device", "devices/platform/RDMA").unwrap();
    std::fs::create_dir_all(machine.root().join("devices/platform/RDMA")).unwrap();
    let topology = machine.topology();
    assert!(topology.nic("mlx5_9").unwrap().function.as_ref().unwrap_err().contains("nowhere"));
    assert_eq!(topology.nic("mlx5_8").unwrap().function, Err("it is no PCI device".into()));
    for lost in ["0000:ef:00.0", "0000:f0:00.0", "0000:f1:00.0"] {
        let path = topology.path(address("0000:03:00.0"), address(lost));
        assert!(path.level == Level::Unknown && path.why.contains(lost), "{}", path.why);
    }
}

#[test]
fn what_is_opened_near_a_function_is_never_the_software_device() {
    let function = address("0000:00:00.0");
    match Device::open_near_function(function) {
        Ok(device) => assert_eq!(device.provider(), Provider::Verbs),
        Err(error) => {
            let text = error.to_string();
            let Error::NoNearNic { function: asked, candidates } = error else { panic!("{text}") };
            assert_eq!(asked, function);
            for candidate in &candidates {
                let why = candidate.unusable.as_deref().unwrap();
                let parts = [candidate.name.as_str(), why, &candidate.path.level.to_string()];
                assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            }
            assert!(!candidates.is_empty() || text.contains("/sys/class/infiniband"), "{text}");
        }
    }
}
