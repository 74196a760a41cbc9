//! Reads what other programs wrote about a machine's PCIe tree, and writes it as a tree that looks like sysfs: dumps of hwloc
//! (`lstopo topology.xml`) and of NCCL (`NCCL_TOPO_DUMP_FILE`), also those that are made for `NCCL_TOPO_FILE` by hand.

mod hwloc;
mod nccl;
mod nvlinks;
mod tree;

use std::path::Path;

use anyhow::{Context, Result, bail};
use tokio_rdma::topology::PciAddress;

pub use nvlinks::NvLink;
pub use tree::Tree;

/// Writes the machine that the dump describes below `root`, for `Topology::read_from`.
///
/// What a dump does not tell is not in the tree: it knows no ACS and no IOMMU, so those are unknown, or absent.
pub fn write(xml: &str, root: &Path) -> Result<()> {
    let document = parse(xml)?;
    // Those of real machines are nested fifteen deep, and the readers call themselves for each level.
    const DEEPEST: usize = 200;
    if document.descendants().any(|element| element.ancestors().nth(DEEPEST).is_some()) {
        bail!("its elements are nested more than {DEEPEST} deep");
    }
    let machine = match document.root_element().tag_name().name() {
        "topology" => hwloc::read(document.root_element()),
        "system" => nccl::read(document.root_element()),
        other => bail!("the first element is <{other}>: neither hwloc's <topology> nor NCCL's <system>"),
    };
    if machine.functions.is_empty() {
        bail!("no PCI device is in it; hwloc wants `lstopo --filter io:all`");
    }
    machine.write(&Tree::new(root)).with_context(|| format!("write below {}", root.display()))
}

/// The NVLinks that the dump tells of, for which sysfs has no place.
pub fn nvlinks(xml: &str) -> Result<Vec<NvLink>> {
    Ok(nvlinks::read(&parse(xml)?))
}

fn parse(xml: &str) -> Result<roxmltree::Document<'_>> {
    // hwloc names a DTD, which is not read.
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    roxmltree::Document::parse_with_options(xml, options).context("not XML")
}

/// What a dump tells.
#[derive(Default)]
struct Machine {
    nodes: Vec<Node>,
    functions: Vec<Function>,
    nics: Vec<Nic>,
}

/// A NUMA node.
struct Node {
    number: u32,
    cpus: Vec<usize>,
}

/// A PCI function, bridges too.
#[derive(Clone, Default)]
struct Function {
    address: Option<PciAddress>,
    /// The host bridge as in sysfs, if the dump has one.
    host: Option<String>,
    above: Vec<PciAddress>,
    /// Base class and subclass, 8 bits each.
    class: u32,
    vendor: Option<u32>,
    device: Option<u32>,
    node: Option<u32>,
    cpus: Vec<usize>,
    /// As in sysfs: speed and width.
    link: Option<(String, String)>,
}

struct Nic {
    name: String,
    function: Option<PciAddress>,
    ports: Vec<Port>,
}

struct Port {
    number: u32,
    active: bool,
    megabits: Option<u32>,
}

impl Machine {
    /// Adds a port to the NIC of this name, which it also adds if it is new.
    fn add_port(&mut self, name: &str, function: Option<PciAddress>, port: Port) {
        // It becomes the name of a folder.
        let name = name.replace('/', "_");
        match self.nics.iter_mut().find(|nic| nic.name == name && nic.function == function) {
            Some(nic) if nic.ports.iter().all(|known| known.number != port.number) => nic.ports.push(port),
            Some(_) => {}
            None => self.nics.push(Nic { name, function, ports: vec![port] }),
        }
    }

    fn write(&self, tree: &Tree) -> Result<()> {
        let list = |nodes: &mut dyn Iterator<Item = &Node>| {
            nodes.map(|node| node.number.to_string()).collect::<Vec<_>>().join(",")
        };
        if !self.nodes.is_empty() {
            tree.file("devices/system/node/online", list(&mut self.nodes.iter()))?;
            let with_cpus = list(&mut self.nodes.iter().filter(|node| !node.cpus.is_empty()));
            tree.file("devices/system/node/has_cpu", with_cpus)?;
        }
        for function in &self.functions {
            function.write(tree)?;
        }
        for nic in &self.nics {
            let function = nic.function.map(|function| function.to_string());
            tree.nic(&nic.name, function.as_deref())?;
            for port in &nic.ports {
                let rate = port.megabits.map(|megabits| format!("{} Gb/sec", f64::from(megabits) / 1000.0));
                let state = if port.active { "4: ACTIVE" } else { "1: DOWN" };
                tree.port(&nic.name, port.number, state, rate.as_deref())?;
            }
        }
        Ok(())
    }
}

impl Function {
    fn write(&self, tree: &Tree) -> Result<()> {
        let Some(address) = self.address else { return Ok(()) };
        let mut place = self.host.clone().unwrap_or_else(|| "hidden".to_owned());
        for name in self.above.iter().chain([&address]) {
            place += &format!("/{name}");
        }
        let hex = |number: Option<u32>| number.map(|number| format!("{number:#06x}"));
        let (speed, width) = self.link.clone().unzip();
        let node = self.node.map_or_else(|| "-1".to_owned(), |node| node.to_string());
        let cpus = (!self.cpus.is_empty()).then(|| ranges(&self.cpus));
        let attributes = [
            ("class", Some(format!("{:#06x}00", self.class))),
            ("vendor", hex(self.vendor)),
            ("device", hex(self.device)),
            ("numa_node", Some(node)),
            ("local_cpulist", cpus),
            ("current_link_speed", speed.clone()),
            ("max_link_speed", speed),
            ("current_link_width", width.clone()),
            ("max_link_width", width),
        ];
        let attributes: Vec<_> =
            attributes.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?))).collect();
        Ok(tree.function(&place, &attributes)?)
    }
}

/// Like `0-3,8`.
fn ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect::<Vec<_>>().join(",")
}

/// The bits of a mask like `0x0000ffff,,0xffffffff`: words of 32 bits, the highest first, and zero where there is nothing.
fn bits(mask: &str) -> Vec<usize> {
    let mut bits = Vec::new();
    for (index, word) in mask.split(',').rev().enumerate() {
        let word = u64::from_str_radix(word.trim().trim_start_matches("0x"), 16).unwrap_or(0);
        bits.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| 32 * index + bit));
    }
    bits.sort_unstable();
    bits
}

/// A number like `0x10de` or `10de`.
fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}
