//! Random trees.

use proptest::prelude::*;
use tokio_rdma::topology::{Level, PciAddress, Topology};

use crate::machine::Machine;

const HOSTS: usize = 3;

/// For each function the number of the one above it, which is before it, or one of the host bridges.
#[derive(Clone, Debug)]
struct Tree {
    nodes: [i32; HOSTS],
    above: Vec<usize>,
}

fn trees() -> impl Strategy<Value = Tree> {
    let above = proptest::collection::vec(any::<prop::sample::Index>(), 2..24);
    (proptest::array::uniform3(-1..2), above).prop_map(|(nodes, above)| {
        let above = above.iter().enumerate().map(|(number, index)| index.index(number + HOSTS)).collect();
        Tree { nodes, above }
    })
}

impl Tree {
    /// From the host bridge down to the function. A number below `HOSTS` is a host bridge.
    fn chain(&self, function: usize) -> Vec<usize> {
        let mut chain = vec![function + HOSTS];
        while let Some(above) = chain.last().and_then(|last| last.checked_sub(HOSTS)) {
            chain.push(self.above[above]);
        }
        chain.reverse();
        chain
    }

    fn name(number: usize) -> String {
        match number.checked_sub(HOSTS) {
            None => format!("pci0000:{number:02x}"),
            Some(function) => format!("0000:{function:02x}:01.0"),
        }
    }

    fn topology(&self) -> (Machine, Topology) {
        let machine = Machine::new();
        machine.nodes("0-1", "0-1");
        for function in 0..self.above.len() {
            let chain = self.chain(function);
            let place: Vec<_> = chain.iter().map(|number| Self::name(*number)).collect();
            machine.function(&place.join("/"), "0x030000", &self.nodes[chain[0]].to_string());
        }
        let topology = machine.topology();
        (machine, topology)
    }
}

fn address(function: usize) -> PciAddress {
    PciAddress::new(0, function as u8, 1, 0).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn levels_are_symmetric_and_as_the_tree_is(tree in trees()) {
        let (_machine, topology) = tree.topology();
        for a in 0..tree.above.len() {
            for b in 0..tree.above.len() {
                let level = topology.level(address(a), address(b));
                prop_assert_eq!(level, topology.level(address(b), address(a)));
                let (above_a, above_b) = (tree.chain(a), tree.chain(b));
                let shared = above_a.iter().zip(&above_b).take_while(|(a, b)| a == b).count();
                let nodes = (tree.nodes[above_a[0]], tree.nodes[above_b[0]]);
                let expected: &[Level] = match shared {
                    _ if a == b => &[Level::Pix],
                    0 if nodes.0 < 0 || nodes.1 < 0 => &[Level::Unknown],
                    0 if nodes.0 == nodes.1 => &[Level::Node],
                    0 => &[Level::Sys],
                    1 => &[Level::Phb],
                    _ => &[Level::Pix, Level::Pxb],
                };
                prop_assert!(expected.contains(&level), "{} and {}: {:?}", a, b, topology.path(address(a), address(b)));
                // Each bridge of the way is above one of the two, and there are none twice.
                let mut bridges: Vec<_> = topology.path(address(a), address(b)).bridges;
                let above: Vec<_> = above_a.iter().chain(&above_b).map(|number| Tree::name(*number)).collect();
                prop_assert!(bridges.iter().all(|bridge| above.contains(&bridge.address.to_string())));
                let count = bridges.len();
                bridges.sort_by_key(|bridge| bridge.address);
                bridges.dedup_by_key(|bridge| bridge.address);
                prop_assert_eq!(bridges.len(), count);
            }
        }
    }

    #[test]
    fn nothing_panics_on_any_file(content in proptest::collection::vec(any::<u8>(), 0..300), text in "[0-9,xX: -]{0,40}") {
        let machine = Machine::server();
        for function in ["0000:03:00.0", "0000:02:00.0", "0000:04:00.0"] {
            machine.attribute(function, "config", &content);
            for name in ["numa_node", "local_cpulist", "current_link_speed", "current_link_width", "class", "vendor"] {
                machine.attribute(function, name, &text);
            }
        }
        for file in ["devices/system/node/has_cpu", "class/infiniband/mlx5_1/ports/1/state", "class/infiniband/mlx5_1/ports/1/rate", "class/infiniband/rxe0/parent"] {
            machine.tree.file(file, &text).unwrap();
        }
        machine.tree.file("override", &content).unwrap();
        let topology = machine.topology();
        for gpu in topology.functions() {
            topology.nics_for(gpu.address);
        }
        let _ = topology.with_overrides(machine.root().join("override"));
    }

    #[test]
    fn nothing_panics_on_any_address(text in "\\PC{0,20}|[0-9a-fA-F:.]{0,20}") {
        if let Ok(address) = text.parse::<PciAddress>() {
            prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
        }
    }
}
