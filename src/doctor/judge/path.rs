//! Links that are about the way between the two.

use crate::doctor::finding::{Finding, Link, Source};
use crate::topology::{Acs, Answer, Bridge, Function, IommuMode, Level, PciPath};

/// How near they are.
pub(in crate::doctor) fn level(path: &PciPath) -> Finding {
    let asked = match path.overridden {
        Some(line) => format!("line {line} of the override file"),
        None => "PCI topology in sysfs".to_owned(),
    };
    let by = if path.overridden.is_some() { ", as the override file says" } else { "" };
    let value = |what: &str| format!("{}: {what}{by}", path.level);
    let finding = match path.level {
        Level::Pix => Finding::ok(Link::Level, value("below the same PCIe switch")),
        Level::Pxb => Finding::ok(Link::Level, value("below the same root port, switches in between")),
        Level::Phb => Finding::ok(Link::Level, value("through the CPU's root complex")).remark(
            "slower than below one switch, on some CPUs by much: measure it, and prefer a NIC that is PIX or PXB",
        ),
        Level::Node => Finding::ok(Link::Level, value("between root complexes of one NUMA node")).remark(
            "slower than below one switch, on some CPUs by much: measure it, and prefer a NIC that is PIX or PXB",
        ),
        Level::Sys => Finding::broken(
            Link::Level,
            value("between CPUs"),
            "their link carries little peer-to-peer traffic: take a NIC of the GPU's own NUMA node, or allow staging",
        ),
        _ => Finding::unknown(
            Link::Level,
            "unknown: no way between them is to be seen",
            "write what the machine's documentation says into a file (GPU NIC LEVEL in a line) and name it in TOKIO_RDMA_TOPOLOGY",
        ),
    };
    finding.told_by(Source::new(asked, &path.why))
}

/// Whether a bridge between them sends their traffic up to the CPU.
pub(in crate::doctor) fn acs(path: &PciPath) -> Finding {
    let redirecting = |bridge: &&Bridge| bridge.acs.redirects() == Answer::Yes;
    let named: Vec<_> = path.bridges.iter().filter(redirecting).map(|bridge| bridge.address.to_string()).collect();
    let by_override = path.overridden.is_some() && path.level <= Level::Pxb;
    let is_hidden = path.common.is_none() && (by_override || path.level == Level::Unknown);
    let finding = match path.acs_redirect() {
        _ if is_hidden => Finding::unknown(
            Link::Acs,
            "the bridges between them are not to be seen",
            "a hypervisor that hides them has to see to it; measure what the path carries (doctor --probe)",
        ),
        Answer::No if path.common.is_none() && path.level >= Level::Phb => {
            Finding::ok(Link::Acs, "of no account: the traffic goes through the root complex in any case")
        }
        Answer::No => Finding::ok(Link::Acs, format!("no bridge redirects; on the way: {}", path.bridges.len())),
        Answer::Yes => Finding::broken(
            Link::Acs,
            format!("redirects at {}", named.join(", ")),
            "turn ACS off for these bridges (setpci -s BRIDGE ECAP_ACS+6.w=0000, or in the firmware); in a virtual machine, that is its host's to do",
        ),
        Answer::Unknown(why) => Finding::unknown(
            Link::Acs,
            why,
            "run the doctor as root: others see 64 bytes of a device's configuration space",
        ),
    };
    finding.told_by_all(path.bridges.iter().map(|bridge| {
        let answer = match &bridge.acs {
            Acs::Absent => "no ACS".to_owned(),
            Acs::Control(control) => format!("ACS control {control:#06x}"),
            Acs::Unknown(why) => why.clone(),
        };
        Source::new(format!("/sys/bus/pci/devices/{}/config", bridge.address), answer)
    }))
}

/// Whether addresses go through unchanged, for both of them.
pub(in crate::doctor) fn iommu(functions: &[&Function]) -> Finding {
    const ADVICE: &str = "GPUDirect RDMA needs addresses to go through unchanged: boot with iommu=pt, or turn the IOMMU off in the firmware";
    let shown = |mode: &IommuMode| match mode {
        IommuMode::None => "none".to_owned(),
        IommuMode::Identity => "identity".to_owned(),
        IommuMode::Translated(kind) => kind.clone(),
        IommuMode::Blocked => "blocked".to_owned(),
        IommuMode::Unknown(why) => why.clone(),
    };
    let sources = functions.iter().map(|function| {
        let (asked, answer) = match function.iommu.group {
            Some(group) => (format!("/sys/kernel/iommu_groups/{group}/type"), shown(&function.iommu.mode)),
            None => (format!("/sys/bus/pci/devices/{}/iommu_group", function.address), "not there".to_owned()),
        };
        Source::new(asked, answer)
    });
    let mut modes = functions.iter().map(|function| &function.iommu.mode);
    let finding =
        if let Some(mode) = modes.clone().find(|mode| matches!(mode, IommuMode::Translated(_) | IommuMode::Blocked)) {
            Finding::broken(Link::Iommu, format!("it translates ({})", shown(mode)), ADVICE)
        } else if let Some(mode) = modes.clone().find(|mode| !matches!(mode, IommuMode::None | IommuMode::Identity)) {
            Finding::unknown(Link::Iommu, shown(mode), ADVICE)
        } else if functions.is_empty() {
            Finding::unknown(Link::Iommu, "neither has a place in sysfs", ADVICE)
        } else if modes.all(|mode| *mode == IommuMode::None) {
            Finding::ok(Link::Iommu, "none takes part")
        } else {
            Finding::ok(Link::Iommu, "pass-through")
        };
    finding.told_by_all(sources)
}

/// Whether the NIC keeps translations of its own.
pub(in crate::doctor) fn ats(nic: &Function) -> Finding {
    let source = |answer: &str| Source::new(format!("/sys/bus/pci/devices/{}/config", nic.address), answer);
    match &nic.ats {
        Answer::Yes => Finding::ok(Link::Ats, "on").told_by(source("ATS enabled")),
        Answer::No => Finding::ok(Link::Ats, "off; counts only beside an IOMMU that translates")
            .told_by(source("ATS not enabled")),
        Answer::Unknown(why) => Finding::unknown(
            Link::Ats,
            why,
            "run the doctor as root; without an IOMMU that translates it is of no account",
        )
        .told_by(source(why)),
    }
}

/// Whether both are on one NUMA node.
pub(in crate::doctor) fn numa(gpu: Option<&Function>, nic: Option<&Function>) -> Finding {
    let node = |function: Option<&Function>| function.and_then(|function| function.numa_node);
    let shown = |node: Option<u32>| node.map_or_else(|| "-1".to_owned(), |node| node.to_string());
    let sources = [gpu, nic].into_iter().flatten().map(|function| {
        Source::new(format!("/sys/bus/pci/devices/{}/numa_node", function.address), shown(function.numa_node))
    });
    let finding = match (node(gpu), node(nic)) {
        (Some(gpu), Some(nic)) if gpu == nic => Finding::ok(Link::Numa, format!("both on node {gpu}")),
        (Some(gpu), Some(nic)) => Finding::broken(
            Link::Numa,
            format!("the GPU is on node {gpu}, the NIC on node {nic}"),
            "take a NIC of the GPU's node; run the program's threads on the NIC's CPUs (Device::local_cpus)",
        ),
        (gpu, nic) => Finding::unknown(
            Link::Numa,
            format!("the GPU is on node {}, the NIC on node {}", shown(gpu), shown(nic)),
            "virtual machines hide it, and firmware may: the level tells what is known of the way",
        ),
    };
    finding.told_by_all(sources)
}
