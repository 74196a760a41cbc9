//! NCCL's XML, which RCCL and vendors of virtual machines write too.

use roxmltree::Node as Element;
use tokio_rdma::topology::PciAddress;

use super::{Function, Machine, Node, Port, bits, hex};

const DISPLAY: u32 = 0x03;
const NETWORK: u32 = 0x02;
const BRIDGE: u32 = 0x0604;
const NVIDIA: u32 = 0x10de;
const AMD: u32 = 0x1002;

/// NCCL shows a switch as one bridge, and of host bridges only the CPU behind them. So each bridge becomes an upstream port with a
/// downstream port for each device below it, and what hangs on one CPU, in one domain, is below one host bridge.
pub fn read(system: Element<'_, '_>) -> Machine {
    let mut reader = Reader::default();
    for cpu in system.descendants().filter(|element| element.has_tag_name("cpu")) {
        reader.cpu(cpu);
    }
    reader.machine
}

#[derive(Default)]
struct Reader {
    machine: Machine,
    /// How many functions were made up.
    invented: u32,
    cpus: u32,
}

impl Reader {
    fn cpu(&mut self, cpu: Element<'_, '_>) {
        let node = cpu.attribute("numaid").and_then(|number| number.parse::<u32>().ok());
        let cpus = cpu.attribute("affinity").map(bits).unwrap_or_default();
        if let Some(number) = node.filter(|number| self.machine.nodes.iter().all(|node| node.number != *number)) {
            // A CPU has CPUs, also where the dump does not count them.
            let cpus = if cpus.is_empty() { vec![0] } else { cpus.clone() };
            self.machine.nodes.push(Node { number, cpus });
        }
        self.cpus += 1;
        let above = Function { node, cpus, ..Function::default() };
        cpu.children().for_each(|child| self.element(child, &above));
    }

    fn element(&mut self, element: Element<'_, '_>, above: &Function) {
        match element.tag_name().name() {
            "pci" => self.function(element, above),
            "nic" => element.children().for_each(|child| self.element(child, above)),
            "net" => self.net(element, above.address),
            _ => {}
        }
    }

    fn function(&mut self, pci: Element<'_, '_>, above: &Function) {
        let class = pci.attribute("class").and_then(hex).map_or_else(|| by_content(pci), |class| class >> 8);
        let is_bridge = class == BRIDGE || pci.children().any(|child| child.has_tag_name("pci"));
        let address = pci.attribute("busid").and_then(|text| text.parse().ok());
        let Some(address) = address.or_else(|| is_bridge.then(|| self.invent())) else { return };
        let function = self.below(above, address, |function| Function {
            class: if is_bridge { BRIDGE } else { class },
            vendor: vendor(pci, class),
            device: pci.attribute("device").and_then(hex),
            link: pci
                .attribute("link_speed")
                .zip(pci.attribute("link_width"))
                .map(|(speed, width)| (speed.into(), width.into())),
            ..function
        });
        let nets = pci.descendants().any(|child| child.has_tag_name("net"));
        if class >> 8 == NETWORK && !nets && !is_bridge {
            // Of tables that vendors wrote by hand: a NIC, which goes by its address.
            self.machine.add_port(
                &address.to_string(),
                Some(address),
                Port { number: 1, active: true, megabits: None },
            );
        }
        for child in pci.children() {
            let port = child.has_tag_name("pci") && is_bridge;
            let above = if port {
                let address = self.invent();
                self.below(&function, address, |function| Function { class: BRIDGE, ..function })
            } else {
                function.clone()
            };
            self.element(child, &above);
        }
    }

    fn below(&mut self, above: &Function, address: PciAddress, with: impl Fn(Function) -> Function) -> Function {
        let cpu = self.cpus;
        let host = above.host.clone().unwrap_or_else(|| format!("pci{:04x}:{cpu:02x}", address.domain()));
        let function = with(Function {
            address: Some(address),
            host: Some(host),
            above: above.above.iter().copied().chain(above.address).collect(),
            class: 0,
            vendor: None,
            device: None,
            link: None,
            node: above.node,
            cpus: above.cpus.clone(),
        });
        self.machine.functions.push(function.clone());
        function
    }

    fn net(&mut self, net: Element<'_, '_>, function: Option<PciAddress>) {
        let Some(name) = net.attribute("name").or_else(|| net.attribute("dev")) else { return };
        let number = |name| net.attribute(name).and_then(|number| number.parse::<u32>().ok());
        let port = Port {
            number: number("port").unwrap_or(1).max(1),
            active: true,
            megabits: number("speed").filter(|speed| *speed > 0),
        };
        self.machine.add_port(name, function, port);
    }

    /// An address in a domain that no machine has.
    fn invent(&mut self) -> PciAddress {
        let number = self.invented;
        self.invented += 1;
        let part = |shift: u32, mask: u32| (number >> shift & mask) as u8;
        PciAddress::new(0xffff_0000 + (number >> 16), part(8, 0xff), part(3, 0x1f), part(0, 7))
            .expect("numbers in range")
    }
}

/// The class of a device that a dump does not class.
fn by_content(pci: Element<'_, '_>) -> u32 {
    match pci.children().find(|child| child.is_element()).map(|child| child.tag_name().name()) {
        Some("gpu") => 0x0302,
        Some("nic") => 0x0200,
        _ => 0,
    }
}

/// Older dumps do not name the vendor.
fn vendor(pci: Element<'_, '_>, class: u32) -> Option<u32> {
    let named = pci.attribute("vendor").and_then(hex).filter(|vendor| *vendor != 0);
    let gpu = || pci.children().find(|child| child.has_tag_name("gpu"));
    named.or_else(|| match gpu() {
        Some(gpu) if gpu.has_attribute("gcn") => Some(AMD),
        _ => (class >> 8 == DISPLAY).then_some(NVIDIA),
    })
}
