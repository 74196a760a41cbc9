//! Links that are about the NIC.

use std::net::{IpAddr, Ipv6Addr};

use super::gpu::NOT_ASKED;
use crate::doctor::files::Files;
use crate::doctor::finding::{Finding, Link, Source};
use crate::doctor::live::{Live, OpenNic, SCATTER_TO_CQE, Verbs};
use crate::doctor::report::Nic;

const INSTALL: &str = "install rdma-core (Debian: libibverbs1 librdmacm1 ibverbs-providers)";

/// Whether there is one.
pub(in crate::doctor) fn nic(nic: Option<&Nic>, count: usize) -> Finding {
    match nic {
        Some(nic) => {
            let place = match (&nic.pci_address, &nic.driver) {
                (None, _) => "without a PCI function".to_owned(),
                (Some(address), None) => format!("software, carried by {address}"),
                (Some(address), Some(driver)) => format!("{driver} at {address}"),
            };
            Finding::ok(Link::Nic, format!("{}: {}, {place}", nic.name, nic.device))
                .told_by(Source::new("/sys/class/infiniband", format!("devices: {count}")))
        }
        None => Finding::broken(
            Link::Nic,
            "no RDMA device",
            "plug in an RDMA NIC and load its driver (mlx5_ib, irdma, bnxt_re, efa); the software device soft0 works without",
        )
        .told_by(Source::new("/sys/class/infiniband", "no device")),
    }
}

/// Whether its library is there and opens it.
pub(in crate::doctor) fn verbs(files: &Files, verbs: &Verbs) -> Finding {
    let maps = files.proc("self/maps");
    let library = maps.line("/libibverbs.so").and_then(|line| line.split_whitespace().last());
    let release = library.and_then(release);
    let loaded = match &release {
        Some(release) => format!("libibverbs of rdma-core {release}"),
        None => "libibverbs".to_owned(),
    };
    let source = library.map(|library| maps.showing(library));
    let finding = match verbs {
        Verbs::NotAsked => Finding::unknown(Link::Verbs, NOT_ASKED, "run it on the machine itself"),
        Verbs::Failed(error) if library.is_some() => {
            let advice = "load the kernel's side of it (modprobe ib_uverbs), and the driver of the NIC";
            Finding::broken(Link::Verbs, format!("{loaded} shows no devices"), advice)
                .told_by(Source::new("ibv_get_device_list", error))
        }
        Verbs::Failed(error) => Finding::broken(Link::Verbs, "libibverbs cannot be loaded", INSTALL)
            .told_by(Source::new("dlopen(libibverbs.so.1)", error)),
        Verbs::Loaded(Some(Err(error))) => {
            let advice = "check the rights on /dev/infiniband (in a container: --device=/dev/infiniband), and the NIC's provider library";
            Finding::broken(Link::Verbs, format!("{loaded} cannot open the device"), advice)
                .told_by(Source::new("ibv_open_device", error))
        }
        Verbs::Loaded(Some(Ok(_))) => Finding::ok(Link::Verbs, format!("{loaded} opens the device")),
        Verbs::Loaded(None) => Finding::ok(Link::Verbs, loaded),
    };
    finding.told_by_all(source)
}

/// The release of rdma-core in the name of its library: `libibverbs.so.1.14.44.0` is of 44.0.
fn release(library: &str) -> Option<String> {
    let version = library.rsplit_once("libibverbs.so.")?.1;
    let parts: Vec<_> = version.split('.').collect();
    (parts.len() == 4).then(|| parts[2..].join("."))
}

/// A port that is up, or the first one.
pub(in crate::doctor) fn chosen_port(files: &Files, device: &str) -> Option<String> {
    let folder = format!("class/infiniband/{device}/ports");
    let ports = files.sys_folder(&folder);
    let is_up = |port: &&String| {
        let state = files.sys(&format!("{folder}/{port}/state"));
        state.get().is_some_and(|state| state.contains("ACTIVE"))
    };
    ports.iter().find(is_up).or(ports.first()).cloned()
}

/// Whether it is up.
pub(in crate::doctor) fn port(files: &Files, device: &str) -> Finding {
    let Some(port) = chosen_port(files, device) else {
        return Finding::unknown(Link::Port, "no port is to be seen", "look at `rdma link`")
            .told_by(Source::new(format!("/sys/class/infiniband/{device}/ports"), "empty"));
    };
    let read = |file: &str| files.sys(&format!("class/infiniband/{device}/ports/{port}/{file}"));
    let (state, layer, rate) = (read("state"), read("link_layer"), read("rate"));
    let words: Vec<_> = [&layer, &rate].into_iter().filter_map(|it| it.get()).collect();
    let advice =
        "connect the cable and raise the interface (ip link set DEV up); on InfiniBand a subnet manager has to run";
    match state.get() {
        None => Finding::unknown(Link::Port, format!("port {port}: no state is to be read"), "look at `rdma link`"),
        Some(text) if text.contains("ACTIVE") => Finding::ok(Link::Port, format!("port {port}: {}", words.join(", "))),
        Some(text) => Finding::broken(Link::Port, format!("port {port} is not up: {text}"), advice),
    }
    .told_by(state.source())
}

/// What its packets hold.
pub(in crate::doctor) fn mtu(verbs: &Verbs) -> Finding {
    let nic = match opened(verbs, Link::Mtu) {
        Ok(nic) => nic,
        Err(unknown) => return unknown,
    };
    let source = Source::new("ibv_query_port", format!("active_mtu {}, max_mtu {}", nic.active_mtu, nic.max_mtu));
    let finding = Finding::ok(Link::Mtu, format!("{} of {} B", nic.active_mtu, nic.max_mtu)).told_by(source);
    match nic.active_mtu < nic.max_mtu {
        true => finding.remark("larger packets cost less: on Ethernet an interface MTU of 4200 or 9000 at both ends and in between gives 4096"),
        false => finding,
    }
}

/// Its address.
pub(in crate::doctor) fn gid(files: &Files, device: &str) -> Finding {
    let folder = chosen_port(files, device).map(|port| format!("class/infiniband/{device}/ports/{port}"));
    let Some(folder) = folder else {
        return Finding::unknown(Link::Gid, "no port is to be seen", "look at `rdma link`");
    };
    let ethernet = files.sys(&format!("{folder}/link_layer")).get() != Some("InfiniBand");
    let gids: Vec<_> =
        files.sys_folder(&format!("{folder}/gids")).iter().filter_map(|i| Gid::read(files, &folder, i)).collect();
    let usable: Vec<_> = gids.iter().filter(|gid| !ethernet || gid.is_usable_on_ethernet()).collect();
    // An IPv4 address is what sockets of the same hosts use most.
    let best = usable.iter().find(|gid| gid.ip().is_ipv4()).or(usable.first());
    let table = Source::new(format!("/sys/{folder}/gids"), format!("{} entries, {} usable", gids.len(), usable.len()));
    let finding = match best {
        Some(gid) => Finding::ok(Link::Gid, gid.text()).told_by(gid.source.clone()),
        None if gids.iter().any(|gid| gid.is_roce_v2()) => Finding::broken(
            Link::Gid,
            "only link-local addresses",
            "give the NIC's network interface an IP address (ip addr add ADDRESS/LEN dev DEV)",
        ),
        None if !gids.is_empty() => {
            Finding::broken(Link::Gid, "no address of RoCE v2", "turn RoCE v2 on, and give the interface an IP address")
        }
        None => Finding::broken(Link::Gid, "no address", "raise the NIC's network interface and give it an IP address"),
    };
    finding.told_by(table)
}

/// An entry of the port's table.
struct Gid {
    index: String,
    value: Ipv6Addr,
    kind: String,
    interface: Option<String>,
    source: Source,
}

impl Gid {
    /// `None` for an empty place.
    fn read(files: &Files, folder: &str, index: &str) -> Option<Self> {
        let value = files.sys(&format!("{folder}/gids/{index}"));
        let source = value.source();
        let value: Ipv6Addr = value.get()?.parse().ok().filter(|it: &Ipv6Addr| !it.is_unspecified())?;
        let attribute = |name: &str| files.sys(&format!("{folder}/gid_attrs/{name}/{index}")).get().map(str::to_owned);
        let kind = attribute("types").unwrap_or_else(|| "of unknown type".to_owned());
        Some(Self { index: index.to_owned(), value, kind, interface: attribute("ndevs"), source })
    }

    fn ip(&self) -> IpAddr {
        self.value.to_canonical()
    }

    fn is_roce_v2(&self) -> bool {
        self.kind == "RoCE v2"
    }

    fn is_usable_on_ethernet(&self) -> bool {
        self.is_roce_v2() && !matches!(self.ip(), IpAddr::V6(v6) if v6.is_unicast_link_local())
    }

    fn text(&self) -> String {
        let interface = self.interface.as_deref().map(|name| format!(" on {name}")).unwrap_or_default();
        format!("index {}: {}, {}{interface}", self.index, self.kind, self.ip())
    }
}

/// mlx5 delivers small messages inside their completions unless it is told not to, and its library then copies them to the posted
/// buffer with the CPU (`mlx5dv(7)`), which is a fault where the buffer is a GPU's.
pub(in crate::doctor) fn cpu_copies(nic: &Nic, live: &Live) -> Finding {
    let driver = nic.driver.as_deref().unwrap_or("not there");
    let driver_source = Source::new(format!("/sys/class/infiniband/{}/device/driver", nic.device), driver);
    if !copies_with_cpu(nic.driver.as_deref()) {
        return Finding::ok(Link::CpuCopies, "none, as far as is known of its driver").told_by(driver_source);
    }
    let source = Source::new(SCATTER_TO_CQE, live.scatter_to_cqe.as_deref().unwrap_or("not set"));
    let advice = "start the program with MLX5_SCATTER_TO_CQE=0";
    match (&live.verbs, live.scatter_to_cqe.as_deref()) {
        (Verbs::NotAsked, _) => Finding::unknown(Link::CpuCopies, "it is about the program's environment", advice),
        (_, Some("0")) => Finding::ok(Link::CpuCopies, "none: MLX5_SCATTER_TO_CQE=0"),
        _ => Finding::broken(Link::CpuCopies, "mlx5 would copy small messages with the CPU", advice),
    }
    .told_by_all([driver_source, source])
}

/// Whether the library of this driver does.
pub(crate) fn copies_with_cpu(driver: Option<&str>) -> bool {
    driver == Some("mlx5_core")
}

/// Whether it registers dma-bufs.
pub(in crate::doctor) fn dma_buf_import(verbs: &Verbs) -> Finding {
    match opened(verbs, Link::DmaBufImport).map(|nic| &nic.dma_buf) {
        Err(unknown) => unknown,
        Ok(Ok(source)) => Finding::ok(Link::DmaBufImport, "the NIC registers dma-bufs").told_by(source.clone()),
        Ok(Err(source)) => Finding::broken(
            Link::DmaBufImport,
            "the NIC registers no dma-bufs",
            "it takes Linux 5.12, rdma-core 34 and a driver that can (mlx5, irdma, bnxt_re, efa; not Soft-RoCE); or load nvidia-peermem",
        )
        .told_by(source.clone()),
    }
}

fn opened(verbs: &Verbs, link: Link) -> Result<&OpenNic, Finding> {
    let (value, advice) = match verbs {
        Verbs::Loaded(Some(Ok(nic))) => return Ok(nic),
        Verbs::NotAsked => (NOT_ASKED, "run it on the machine itself"),
        Verbs::Failed(_) => ("nobody to ask without libibverbs", INSTALL),
        Verbs::Loaded(_) => ("the device was not opened", "see what is said of verbs"),
    };
    Err(Finding::unknown(link, value, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        assert_eq!(release("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0").as_deref(), Some("44.0"));
        assert_eq!(release("/usr/lib64/libibverbs.so.1.14.2307mlnx47.1").as_deref(), Some("2307mlnx47.1"));
        for name in ["/usr/lib/libibverbs.so.1", "/usr/lib/libibverbs-x.so", ""] {
            assert_eq!(release(name), None, "{name}");
        }
    }
}
