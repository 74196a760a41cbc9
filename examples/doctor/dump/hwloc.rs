//! hwloc's XML, of its versions 1 to 3.

use roxmltree::Node as Element;
use tokio_rdma::topology::PciAddress;

use super::{Function, Machine, Node, Port, bits, hex};

pub fn read(topology: Element<'_, '_>) -> Machine {
    // Since version 3 the type of an operating system's device is a mask.
    let masks =
        topology.attribute("version").and_then(|version| version.split('.').next()?.parse().ok()).unwrap_or(1) >= 3;
    let mut machine = Machine::default();
    let start = Function::default();
    topology.children().for_each(|object| walk(object, &start, masks, &mut machine));
    machine
}

/// `above` is the function that the object is below, or where it would be attached.
fn walk(object: Element<'_, '_>, above: &Function, masks: bool, machine: &mut Machine) {
    let mut here = above.clone();
    if let Some(nodes) = object.attribute("nodeset").map(bits) {
        here.node = if let [one] = nodes[..] { u32::try_from(one).ok() } else { None };
    }
    if let Some(cpus) = object.attribute("cpuset").map(bits) {
        here.cpus = cpus;
    }
    match object.attribute("type") {
        Some("NUMANode") => {
            let number = object.attribute("os_index").and_then(|number| number.parse().ok());
            machine.nodes.extend(number.map(|number| Node { number, cpus: here.cpus.clone() }));
        }
        Some("Bridge") if object.attribute("pci_busid").is_none() => here.host = host(object),
        Some("Bridge" | "PCIDev") => here = function(object, here, machine),
        Some("OSDev") if is_rdma(object, masks) => add_nic(object, above, machine),
        _ => {}
    }
    object.children().filter(Element::is_element).for_each(|child| walk(child, &here, masks, machine));
}

/// Of a range of busses like `0000:[44-54]`.
fn host(bridge: Element<'_, '_>) -> Option<String> {
    let (domain, busses) = bridge.attribute("bridge_pci")?.split_once(":[")?;
    Some(format!("pci{domain}:{}", busses.split('-').next()?))
}

fn function(object: Element<'_, '_>, above: Function, machine: &mut Machine) -> Function {
    let Some(address) = object.attribute("pci_busid").and_then(|text| text.parse::<PciAddress>().ok()) else {
        return above;
    };
    // Like `0302 [10de:2330] [10de:16c1] a1`.
    let kind = object.attribute("pci_type").unwrap_or_default();
    let ids = kind.split(['[', ']']).nth(1).and_then(|ids| ids.split_once(':'));
    let function = Function {
        above: above.above.iter().copied().chain(above.address).collect(),
        address: Some(address),
        class: kind.split_whitespace().next().and_then(hex).unwrap_or(0),
        vendor: ids.and_then(|(vendor, _)| hex(vendor)),
        device: ids.and_then(|(_, device)| hex(device)),
        link: object.attribute("pci_link_speed").and_then(link),
        ..above
    };
    machine.functions.push(function.clone());
    function
}

fn is_rdma(device: Element<'_, '_>, masks: bool) -> bool {
    const OPENFABRICS: u32 = 1 << 5;
    let kind = device.attribute("osdev_type").or_else(|| device.attribute("osdev_types")).unwrap_or_default();
    let number = kind.strip_prefix("0x").map_or_else(|| kind.parse().ok(), hex);
    let by_type = if masks { number.is_some_and(|mask| mask & OPENFABRICS != 0) } else { number == Some(3) };
    by_type
        || [device.attribute("subtype"), Some(kind)].contains(&Some("OpenFabrics"))
        || info(device, "NodeGUID").is_some()
}

fn add_nic(device: Element<'_, '_>, above: &Function, machine: &mut Machine) {
    let Some(name) = device.attribute("name") else { return };
    for number in 1.. {
        let state = info(device, &format!("Port{number}State"));
        if number > 1 && state.is_none() {
            return;
        }
        // EFA's ports are not told of; 4 is active.
        let port = Port { number, active: state.is_none_or(|state| state == "4"), megabits: None };
        machine.add_port(name, above.address, port);
    }
}

fn info<'a>(object: Element<'a, '_>, name: &str) -> Option<&'a str> {
    let mut infos = object.children().filter(|child| child.has_tag_name("info"));
    infos.find(|info| info.attribute("name") == Some(name))?.attribute("value")
}

/// Speed and width of a link with so many GB a second, as far as they can be told from their product: the widest is taken.
fn link(gigabytes: &str) -> Option<(String, String)> {
    const LANES: [(f64, &str); 6] = [
        (0.25, "2.5 GT/s PCIe"),
        (0.5, "5.0 GT/s PCIe"),
        (0.985, "8.0 GT/s PCIe"),
        (1.969, "16.0 GT/s PCIe"),
        (3.938, "32.0 GT/s PCIe"),
        (7.563, "64.0 GT/s PCIe"),
    ];
    let gigabytes: f64 = gigabytes.parse().ok()?;
    [16, 8, 4, 2, 1].into_iter().find_map(|width| {
        let near = |lane: f64| (gigabytes / f64::from(width) / lane - 1.0).abs() < 0.02;
        LANES.iter().find(|(lane, _)| near(*lane)).map(|(_, speed)| ((*speed).to_owned(), width.to_string()))
    })
}
