//! Which NIC for which GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::address::PciAddress;
use super::function::FunctionKind;
use super::path::PciPath;
use super::sysfs::natural;
use super::{Nic, Topology};

/// NICs for a GPU, in the order in which to try them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranking {
    /// Those that can be used, best first.
    pub usable: Vec<Candidate>,
    /// Those that cannot, nearest first, each with its reason.
    pub left_out: Vec<Candidate>,
}

/// A NIC as seen from a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The RDMA device's name, as in `Device::open`.
    pub name: String,
    /// The way to it, and how near it is.
    pub path: PciPath,
    /// Bits a second, in millions: the lesser of its port's rate and of what its PCIe link carries, as far as they are known.
    pub megabits: Option<u32>,
    /// Why it cannot be used, if so.
    pub unusable: Option<String>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, path, unusable, .. } = self;
        write!(f, "{name} ({}): {}", path.level, unusable.as_deref().unwrap_or("usable"))
    }
}

/// What makes a candidate better: nearer, hardware rather than software, faster.
type Rank = (super::Level, bool, Reverse<u32>);

impl Topology {
    /// The NICs for a GPU, best first: nearer ones before farther ones, then hardware before software devices, then by speed.
    ///
    /// Those that are equal in all of that are spread over the GPUs of the machine: the first of the list is this GPU's share of
    /// them. The shares are made so that as few GPUs as possible have to share a NIC; of several ways to do so, GPUs and NICs are paired
    /// in the order of their addresses. The share depends on nothing but the machine: not on `CUDA_VISIBLE_DEVICES`, and not
    /// on which process asks, so processes that each use one GPU need not agree on anything. Behind the first one, equals follow
    /// in turn, so that the GPUs of a NIC that fails do not all move to the same one.
    ///
    /// NICs without a port that is up are left out.
    pub fn nics_for(&self, gpu: PciAddress) -> Ranking {
        let (left_out, mut usable): (Vec<_>, Vec<_>) =
            self.ranked(gpu).into_iter().partition(|(_, it)| it.unusable.is_some());
        let gpus = self.peers(gpu);
        let number = gpus.iter().position(|it| *it == gpu).unwrap_or(0);
        let share = self.shares(&gpus).remove(&gpu);
        let mut start = 0;
        while start < usable.len() {
            let equals = usable[start..].iter().take_while(|(rank, _)| *rank == usable[start].0).count();
            let tier = &mut usable[start..start + equals];
            let mine = tier.iter().position(|(_, it)| Some(&it.name) == share.as_ref());
            tier.rotate_left(mine.unwrap_or(number % equals));
            start += equals;
        }
        let plain = |list: Vec<(Rank, Candidate)>| list.into_iter().map(|(_, candidate)| candidate).collect();
        Ranking { usable: plain(usable), left_out: plain(left_out) }
    }

    /// Those that compete for NICs with this function, and itself, in order.
    fn peers(&self, function: PciAddress) -> Vec<PciAddress> {
        let kind = self.functions.get(&function).map(|it| it.kind);
        let kind = kind.filter(|kind| *kind != FunctionKind::Nic);
        let alike = self.functions.values().filter(|it| Some(it.kind) == kind).map(|it| it.address);
        let mut peers: Vec<_> = alike.collect();
        if peers.is_empty() {
            peers.push(function);
        }
        peers
    }

    /// All NICs as seen from a function, best first, equals by address.
    fn ranked(&self, from: PciAddress) -> Vec<(Rank, Candidate)> {
        let mut ranked: Vec<_> = self.nics.iter().map(|nic| (self.candidate(from, nic), nic)).collect();
        ranked.sort_by_cached_key(|((rank, _), nic)| (*rank, nic.function.clone().ok(), natural(&nic.name)));
        ranked.into_iter().map(|(candidate, _)| candidate).collect()
    }

    fn candidate(&self, from: PciAddress, nic: &Nic) -> (Rank, Candidate) {
        let path = self.path_to_nic(from, nic);
        let function = nic.function.as_ref().ok().and_then(|address| self.functions.get(address));
        let bus = function.and_then(|function| function.link.megabits());
        let megabits = nic.megabits().into_iter().chain(bus).min();
        let rank = (path.level, nic.parent.is_some(), Reverse(megabits.unwrap_or(0)));
        (rank, Candidate { name: nic.name.clone(), path, megabits, unusable: nic.unusable() })
    }

    /// The NIC of each GPU, among the best for it.
    fn shares(&self, gpus: &[PciAddress]) -> BTreeMap<PciAddress, String> {
        let best = |gpu: &PciAddress| {
            let usable: Vec<_> = self.ranked(*gpu).into_iter().filter(|(_, it)| it.unusable.is_none()).collect();
            let first = usable.first().map(|(rank, _)| *rank);
            usable.into_iter().filter(|(rank, _)| Some(*rank) == first).map(|(_, it)| it.name).collect()
        };
        let wishes: Vec<Vec<String>> = gpus.iter().map(best).collect();
        let mut shares = Shares { wishes: &wishes, taken: BTreeMap::new() };
        let mut waiting: Vec<_> = (0..gpus.len()).filter(|gpu| !wishes[*gpu].is_empty()).collect();
        // Each round lets one more GPU share a NIC.
        for limit in 1..=gpus.len() {
            waiting.retain(|gpu| !shares.place(*gpu, limit, &mut Vec::new()));
        }
        let pairs =
            shares.taken.iter().flat_map(|(nic, users)| users.iter().map(move |user| (gpus[*user], (*nic).to_owned())));
        pairs.collect()
    }
}

/// GPUs, by number, and the NICs they get: a matching that is made greater along augmenting paths.
struct Shares<'a> {
    wishes: &'a [Vec<String>],
    taken: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Shares<'a> {
    /// Finds a NIC with fewer than `limit` users, also by moving others to another NIC that they like as well.
    fn place(&mut self, gpu: usize, limit: usize, seen: &mut Vec<&'a str>) -> bool {
        let wishes: &'a [String] = &self.wishes[gpu];
        let free = wishes.iter().find(|nic| self.taken.get(nic.as_str()).is_none_or(|users| users.len() < limit));
        if let Some(nic) = free {
            self.taken.entry(nic).or_default().push(gpu);
            return true;
        }
        for nic in wishes {
            if seen.contains(&nic.as_str()) {
                continue;
            }
            seen.push(nic);
            let users = self.taken.get(nic.as_str()).cloned().unwrap_or_default();
            for user in users {
                if self.place(user, limit, seen) {
                    let users = self.taken.entry(nic).or_default();
                    users.retain(|it| *it != user);
                    users.push(gpu);
                    return true;
                }
            }
        }
        false
    }
}
