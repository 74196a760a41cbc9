//! The way between two functions.

use super::address::PciAddress;
use super::answer::Answer;
use super::config::Acs;
use super::function::{Bridge, PcieLink};
use super::level::Level;
use super::overrides::Name;
use super::sysfs::Place;
use super::{Nic, Topology};

/// The way between two PCI functions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PciPath {
    /// How near they are.
    pub level: Level,
    /// The line of the override file that says so, counted from 1; `None` when sysfs does.
    pub overridden: Option<usize>,
    /// What the level was concluded from, for people.
    pub why: String,
    /// The lowest bridge that both are below, where traffic between them turns around; `None` when that is no bridge.
    pub common: Option<PciAddress>,
    /// The bridges on the way as sysfs shows them, from the first function to the second. Empty when the way is not known.
    pub bridges: Vec<Bridge>,
}

impl PciPath {
    /// Whether a bridge sends traffic between the two up to the root complex, although it could turn around below: the test that the
    /// kernel's `p2pdma` makes (`pci_bridge_has_acs_redir`), on every bridge from each of them up to the common one, that included.
    ///
    /// No where no bridge is on the way, and for [`Level::Phb`] and farther, where all traffic goes through the root complex in any
    /// case; unknown where the way is.
    pub fn acs_redirect(&self) -> Answer {
        if self.common.is_none() {
            return match self.level {
                Level::Unknown => Answer::Unknown(self.why.clone()),
                Level::Pix | Level::Pxb if self.overridden.is_some() => {
                    Answer::Unknown("sysfs does not show the bridges on the way".into())
                }
                _ => Answer::No,
            };
        }
        let named = |bridge: &Bridge| match bridge.acs.redirects() {
            Answer::Unknown(why) => Answer::Unknown(format!("{}: {why}", bridge.address)),
            known => known,
        };
        Answer::any(&self.bridges.iter().map(named).collect::<Vec<_>>())
    }
}

/// What is known of a function's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) numa_node: Option<u32>,
}

/// What sysfs shows of the way between two functions.
#[derive(Debug, PartialEq, Eq)]
struct Way {
    level: Level,
    why: String,
    common: Option<PciAddress>,
    bridges: Vec<PciAddress>,
}

impl Topology {
    /// How near two functions are; the same in both directions. [`Level::Unknown`] for a function that this machine has not.
    pub fn level(&self, a: PciAddress, b: PciAddress) -> Level {
        self.path(a, b).level
    }

    /// The way between two functions: any two, not only GPUs and NICs. The [module's documentation](super) has the rules.
    pub fn path(&self, a: PciAddress, b: PciAddress) -> PciPath {
        let way = match (self.nodes.get(&a), self.nodes.get(&b)) {
            (Some(from), Some(to)) => way((a, from), (b, to), self.has_one_node),
            (None, _) => Way::unknown(format!("sysfs has no function {a}")),
            (_, None) => Way::unknown(format!("sysfs has no function {b}")),
        };
        self.corrected(way, &Name::Function(a), &Name::Function(b))
    }

    /// The way between a function and an RDMA device: to the device's function, or to that of the network interface which
    /// carries it. Of a device without either only the override file can tell.
    pub fn path_to_nic(&self, function: PciAddress, nic: &Nic) -> PciPath {
        match &nic.function {
            Ok(address) => self.path(function, *address),
            Err(why) => {
                let way = Way::unknown(format!("{}: {why}", nic.name));
                self.corrected(way, &Name::Function(function), &Name::Nic(nic.name.clone()))
            }
        }
    }

    fn corrected(&self, way: Way, a: &Name, b: &Name) -> PciPath {
        let Way { level, why, common, bridges } = way;
        let bridge = |address| {
            let unread = || Bridge {
                address,
                acs: Acs::Unknown("only bridges above GPUs and NICs are looked at".into()),
                link: PcieLink::default(),
            };
            self.bridges.get(&address).cloned().unwrap_or_else(unread)
        };
        let path = PciPath { level, overridden: None, why, common, bridges: bridges.into_iter().map(bridge).collect() };
        match self.overrides.get(a, b) {
            None => path,
            Some((level, line)) => {
                let why = format!("line {line} of {} says so", self.overrides.file().display());
                PciPath { level, overridden: Some(line), why, ..path }
            }
        }
    }
}

impl Way {
    fn unknown(why: String) -> Self {
        Self { level: Level::Unknown, why, common: None, bridges: Vec::new() }
    }
}

/// `has_one_node`: whether the machine has one NUMA node with CPUs, and so no link between nodes.
fn way((a, from): (PciAddress, &Node), (b, to): (PciAddress, &Node), has_one_node: bool) -> Way {
    if a == b {
        let why = "they are one function".to_owned();
        return Way { level: Level::Pix, why, common: None, bridges: Vec::new() };
    }
    // A bridge is on its own way to what is below it.
    let chain = |own, node: &Node, other: &Node| {
        let mut chain = node.place.functions.clone();
        if !other.place.functions.contains(&own) {
            chain.pop();
        }
        chain
    };
    let (above_a, above_b) = (chain(a, from, to), chain(b, to, from));
    let (Some(host_a), Some(host_b)) = (&from.place.host_bridge, &to.place.host_bridge) else {
        let lost = if from.place.host_bridge.is_none() { a } else { b };
        return Way::unknown(format!("the place of {lost} is not in sysfs"));
    };
    let shared = above_a.iter().zip(&above_b).take_while(|(a, b)| a == b).count();
    let (below_a, below_b) = (&above_a[shared..], &above_b[shared..]);
    let common = shared.checked_sub(1).map(|last| above_a[last]);
    let bridges = below_a.iter().rev().chain(&common).chain(below_b).copied().collect();
    let (level, why) = if let Some(common) = common {
        let switches = switches(below_a.len(), below_b.len());
        let level = if switches <= 1 { Level::Pix } else { Level::Pxb };
        (level, format!("both are below {common}; switches on the way: {switches}"))
    } else if a.same_device(b) {
        (Level::Pix, "they are functions of one device".to_owned())
    } else if host_a == host_b {
        (Level::Phb, format!("{host_a} is the host bridge of both"))
    } else {
        let hosts = format!("host bridges {host_a} and {host_b}");
        match (from.numa_node, to.numa_node) {
            (Some(one), Some(other)) if one == other => (Level::Node, format!("{hosts}, both of NUMA node {one}")),
            (Some(one), Some(other)) => (Level::Sys, format!("{hosts}, of NUMA nodes {one} and {other}")),
            _ if has_one_node => (Level::Node, format!("{hosts}, on a machine with one NUMA node")),
            (one, _) => {
                let lost = if one.is_none() { a } else { b };
                (Level::Unknown, format!("{hosts}, and sysfs does not say which NUMA node {lost} belongs to"))
            }
        }
    };
    Way { level, why, common, bridges }
}

/// How many switches are on the way between two functions, by the number of bridges between each and their common one.
///
/// A switch shows as two bridges, an upstream port and a downstream port. Where the common bridge is an upstream port, its
/// own switch is passed, and the first bridge on either side is a downstream port of it; so an odd number on a side tells of that switch,
/// and each further pair of another one. What kind of port a bridge is would be in its configuration space, which only root can read:
/// the answer shall not depend on who asks.
fn switches(below_a: usize, below_b: usize) -> usize {
    below_a / 2 + below_b / 2 + ((below_a % 2) | (below_b % 2))
}
