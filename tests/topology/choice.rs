//! Which NIC a GPU gets.

use std::collections::BTreeMap;

use tokio_rdma::topology::{Level, Topology};

use crate::machine::{Machine, address};

const SWITCH: &str = "pci0000:00/0000:00:01.0/0000:01:00.0";

fn names(topology: &Topology, gpu: &str) -> Vec<String> {
    topology.nics_for(address(gpu)).usable.into_iter().map(|nic| nic.name).collect()
}

/// GPUs from 0000:10 on and NICs from 0000:40 on, all below one switch.
fn one_switch(gpus: usize, nics: usize) -> Machine {
    let machine = Machine::new();
    machine.nodes("0", "0");
    for gpu in 0..gpus {
        machine.gpu(&format!("{SWITCH}/0000:02:{gpu:02x}.0/0000:{:02x}:00.0", 0x10 + gpu), "0");
    }
    for nic in 0..nics {
        machine.nic(&format!("mlx5_{nic}"), &format!("{SWITCH}/0000:02:{nic:02x}.1/0000:{:02x}:00.0", 0x40 + nic), "0");
    }
    machine
}

/// How many GPUs each NIC is the first choice of, and the choices in the order of the GPUs.
fn loads(topology: &Topology) -> (BTreeMap<String, usize>, Vec<String>) {
    let first: Vec<_> = topology.gpus().map(|gpu| names(topology, &gpu.address.to_string())[0].clone()).collect();
    let mut loads = BTreeMap::new();
    first.iter().for_each(|nic| *loads.entry(nic.clone()).or_default() += 1);
    (loads, first)
}

#[test]
fn nearer_ones_come_first() {
    let topology = Machine::server().topology();
    let ranking = topology.nics_for(address("0000:03:00.0"));
    let found: Vec<_> = ranking.usable.iter().map(|nic| (nic.name.as_str(), nic.path.level)).collect();
    let expected = [Level::Pix, Level::Pxb, Level::Phb, Level::Node, Level::Sys, Level::Unknown];
    let expected: Vec<_> = (0..).map(|number| format!("mlx5_{number}")).zip(expected).collect();
    assert_eq!(found, expected.iter().map(|(name, level)| (name.as_str(), *level)).collect::<Vec<_>>());
    assert!(ranking.left_out.is_empty());
    assert_eq!(ranking.usable[0].megabits, Some(400_000));
}

#[test]
fn of_equally_near_ones_the_faster_comes_first() {
    let machine = one_switch(1, 4);
    machine.tree.port("mlx5_2", 1, "4: ACTIVE", Some("800 Gb/sec")).unwrap();
    // A port is no faster than its link.
    machine.tree.port("mlx5_1", 1, "4: ACTIVE", Some("800 Gb/sec")).unwrap();
    machine.attribute("0000:41:00.0", "current_link_speed", "32.0 GT/s PCIe");
    machine.attribute("0000:41:00.0", "current_link_width", "8");
    assert_eq!(names(&machine.topology(), "0000:10:00.0"), ["mlx5_2", "mlx5_0", "mlx5_3", "mlx5_1"]);
}

#[test]
fn those_that_are_down_are_left_out_with_the_reason() {
    let machine = Machine::server();
    machine.tree.port("mlx5_0", 1, "1: DOWN", None).unwrap();
    let ranking = machine.topology().nics_for(address("0000:03:00.0"));
    assert_eq!(ranking.usable[0].name, "mlx5_1");
    assert_eq!(ranking.left_out.iter().map(ToString::to_string).collect::<Vec<_>>(), ["mlx5_0 (PIX): port 1 is DOWN"]);
}

#[test]
fn each_gpu_has_its_own_where_there_are_enough() {
    let (loads, first) = loads(&one_switch(4, 4).topology());
    assert_eq!(first, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]);
    assert!(loads.values().all(|load| *load == 1));
}

#[test]
fn where_there_are_too_few_all_are_shared_by_as_few_as_possible() {
    for (gpus, nics) in [(8, 4), (8, 3), (7, 2), (3, 5), (16, 1)] {
        let (loads, _) = loads(&one_switch(gpus, nics).topology());
        assert_eq!(loads.len(), gpus.min(nics), "{gpus} GPUs, {nics} NICs");
        assert!(loads.values().all(|load| *load == gpus / nics || *load == gpus.div_ceil(nics)), "{loads:?}");
    }
}

#[test]
fn a_gpu_that_has_a_choice_leaves_the_nic_to_one_that_has_none() {
    let machine = one_switch(2, 1);
    // PIX for the first GPU only: another function of its own device would be odd, a NIC behind its own switch is not.
    machine.tree.file("override", "0000:10:00.0 mlx5_1 PIX\n").unwrap();
    machine.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:50:00.0", "0");
    let topology = machine.topology().with_overrides(machine.root().join("override")).unwrap();
    assert_eq!(loads(&topology).1, ["mlx5_1", "mlx5_0"]);
}

#[test]
fn one_that_fails_is_spread_over_the_others() {
    let machine = one_switch(4, 4);
    let second: Vec<_> =
        machine.topology().gpus().map(|gpu| names(&machine.topology(), &gpu.address.to_string())[1].clone()).collect();
    assert_eq!(second, ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_0"]);
    // Farther ones, too.
    for (name, place) in [("mlx5_8", "0000:00:08.0/0000:80:00.0"), ("mlx5_9", "0000:00:09.0/0000:90:00.0")] {
        machine.nic(name, &format!("pci0000:00/{place}"), "0");
    }
    let farther: Vec<_> =
        machine.topology().gpus().map(|gpu| names(&machine.topology(), &gpu.address.to_string())[4].clone()).collect();
    assert_eq!(farther, ["mlx5_8", "mlx5_9", "mlx5_8", "mlx5_9"]);
    machine.tree.port("mlx5_1", 1, "1: DOWN", None).unwrap();
    let (loads, first) = loads(&machine.topology());
    assert_eq!(loads.len(), 3, "{first:?}");
    assert!(loads.values().all(|load| *load <= 2), "{first:?}");
}

#[test]
fn a_function_that_is_no_gpu_can_ask_too() {
    let machine = one_switch(2, 3);
    machine.function(&format!("{SWITCH}/0000:02:1f.0/0000:60:00.0"), "0x010802", "0");
    let topology = machine.topology();
    assert_eq!(names(&topology, "0000:60:00.0").len(), 3);
    assert_eq!(topology.nics_for(address("0000:60:00.0")).usable[0].path.level, Level::Pix);
    // One that is not there is near nothing.
    assert_eq!(topology.nics_for(address("0000:77:00.0")).usable[0].path.level, Level::Unknown);
}
