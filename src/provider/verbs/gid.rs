//! GIDs: the addresses of a port. Chosen by type and value, since their order differs between devices.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use super::device::OpenDevice;
use super::sys;
use crate::error::{Error, Result};

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) index: u32,
    pub(super) kind: Kind,
    pub(super) value: [u8; 16],
}

/// Worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Unknown,
    InfiniBand,
    RoceV1,
    RoceV2,
}

/// How far a GID reaches. Worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    LinkLocal,
    Routable,
    /// An IPv4 address, which is what sockets of the same hosts use most.
    V4,
}

impl Gid {
    /// The IP address that a RoCE GID is.
    fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.value).to_canonical()
    }

    fn reach(&self) -> Reach {
        match self.ip() {
            IpAddr::V4(_) => Reach::V4,
            IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80 => Reach::LinkLocal,
            IpAddr::V6(_) => Reach::Routable,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Unknown => "unknown type",
            Kind::InfiniBand => "InfiniBand",
            Kind::RoceV1 => "RoCE v1",
            Kind::RoceV2 => "RoCE v2",
        };
        write!(f, "index {}, {kind}, {}", self.index, Ipv6Addr::from(self.value))
    }
}

/// The port's table, without its empty entries.
pub(super) fn table(device: &OpenDevice) -> Vec<Gid> {
    let entries = (0..device.port_attr.gid_tbl_len.max(0) as u32).filter_map(|index| entry(device, index));
    entries.filter(|gid| gid.value != [0; 16]).collect()
}

/// The IP addresses of a RoCE port.
pub(super) fn addresses(device: &OpenDevice) -> Vec<IpAddr> {
    let mut addresses: Vec<_> = table(device).iter().filter(|gid| gid.kind == Kind::RoceV2).map(Gid::ip).collect();
    addresses.dedup();
    addresses
}

fn entry(device: &OpenDevice, index: u32) -> Option<Gid> {
    // SAFETY: integers, of which zero is a value.
    let mut entry: sys::ibv_gid_entry = unsafe { std::mem::zeroed() };
    let port = device.port;
    // SAFETY: the context is live.
    let returned = unsafe { sys::ibv_query_gid_ex(device.verbs(), device.raw(), port.into(), index, &mut entry) };
    let kind = match returned {
        Some(0) => match entry.gid_type {
            sys::IBV_GID_TYPE_IB => Kind::InfiniBand,
            sys::IBV_GID_TYPE_ROCE_V1 => Kind::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => Kind::RoceV2,
            _ => Kind::Unknown,
        },
        Some(_) => return None,
        None => {
            // SAFETY: the context is live, the result goes to a place of ours.
            let returned =
                unsafe { (device.verbs().ibv_query_gid)(device.raw(), port, index as i32, &raw mut entry.gid) };
            if returned != 0 {
                return None;
            }
            kind_from_sysfs(device, index)
        }
    };
    // SAFETY: 16 bytes, however they are looked at.
    Some(Gid { index, kind, value: unsafe { entry.gid.raw } })
}

/// What libraries older than `ibv_query_gid_ex` leave to the program.
fn kind_from_sysfs(device: &OpenDevice, index: u32) -> Kind {
    let path = format!("/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{index}", device.name(), device.port);
    match std::fs::read_to_string(path).as_deref().map(str::trim) {
        Ok("RoCE v2") => Kind::RoceV2,
        // The kernel calls both of them so.
        Ok("IB/RoCE v1") if device.port_attr.link_layer == super::device::ETHERNET => Kind::RoceV1,
        Ok("IB/RoCE v1") => Kind::InfiniBand,
        _ => Kind::Unknown,
    }
}

/// The GID to connect from: the one that is `local` where an address is given, and the best one otherwise.
pub(super) fn choose(table: &[Gid], local: Option<IpAddr>) -> Result<Gid> {
    let local = local.filter(|ip| !ip.is_unspecified());
    // InfiniBand's GIDs are no IP addresses, so none can be asked for.
    let fits = |gid: &&Gid| local.is_none_or(|ip| gid.kind == Kind::InfiniBand || gid.ip() == ip.to_canonical());
    // Of equals, the first.
    let best = table.iter().filter(fits).rev().max_by_key(|gid| (gid.kind, gid.reach()));
    best.copied().ok_or_else(|| {
        let wanted = local.map_or_else(|| "any address".to_owned(), |ip| ip.to_string());
        let entries: Vec<_> = table.iter().map(ToString::to_string).collect();
        let there = if entries.is_empty() { "no entry".to_owned() } else { entries.join("; ") };
        Error::Invalid { operation: "choose a GID", reason: format!("none is {wanted}; the port's table has {there}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, kind: Kind, value: &str) -> Gid {
        let ip: IpAddr = value.parse().unwrap();
        let value = match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        Gid { index, kind, value: value.octets() }
    }

    fn mixed() -> Vec<Gid> {
        vec![
            gid(0, Kind::RoceV1, "fe80::1"),
            gid(1, Kind::RoceV2, "fe80::1"),
            gid(2, Kind::RoceV1, "10.1.1.1"),
            gid(3, Kind::RoceV2, "2001:db8::1"),
            gid(4, Kind::RoceV2, "10.1.1.1"),
            gid(5, Kind::RoceV2, "10.1.1.2"),
        ]
    }

    #[test]
    fn the_default_is_roce_v2_over_ipv4_wherever_it_stands() {
        let mut table = mixed();
        assert_eq!(choose(&table, None).unwrap().index, 4);
        table.reverse();
        assert_eq!(choose(&table, None).unwrap().value, table[0].value);
        table.retain(|gid| gid.reach() != Reach::V4);
        assert_eq!(choose(&table, None).unwrap().index, 3);
    }

    #[test]
    fn an_address_finds_its_gid_in_the_better_type() {
        for (ip, index) in [("10.1.1.2", 5), ("10.1.1.1", 4), ("fe80::1", 1), ("0.0.0.0", 4)] {
            assert_eq!(choose(&mixed(), Some(ip.parse().unwrap())).unwrap().index, index, "{ip}");
        }
        let infiniband = [gid(0, Kind::InfiniBand, "fe80::5")];
        assert_eq!(choose(&infiniband, Some("10.0.0.1".parse().unwrap())).unwrap().index, 0);
    }

    #[test]
    fn an_address_that_is_not_there_is_told_with_what_is() {
        let text = choose(&mixed(), Some("10.9.9.9".parse().unwrap())).unwrap_err().to_string();
        for part in ["10.9.9.9", "index 4, RoCE v2, ::ffff:10.1.1.1", "index 0, RoCE v1, fe80::1"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(choose(&[], None).unwrap_err().to_string().contains("no entry"));
    }
}
