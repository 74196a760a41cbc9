//! Links that are about the machine and the process.

use crate::doctor::files::Files;
use crate::doctor::finding::{Finding, Link, Source};
use crate::doctor::units::bytes;

/// Where the kernel shows a module that gives NICs a GPU's memory: NVIDIA's peer memory module, now and by its older names.
pub(crate) const PEER_MEMORY: [&str; 4] = [
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
    "module/nv_peer_mem/version",
];

/// Whether it is loaded.
pub(in crate::doctor) fn peer_memory(files: &Files) -> Finding {
    if let Some(file) = PEER_MEMORY.into_iter().find(|file| files.sys_exists(file)) {
        let version = files.sys(file);
        let module = file.rsplit('/').nth(1).unwrap_or(file);
        let shown = format!("{module} {} is loaded", version.get().unwrap_or("of unknown version"));
        return Finding::ok(Link::PeerMemory, shown).told_by(version.source());
    }
    Finding::broken(
        Link::PeerMemory,
        "nvidia-peermem is not loaded",
        "modprobe nvidia-peermem (it needs a kernel or an OFED with peer memory), or use dma-bufs",
    )
    .told_by_all(PEER_MEMORY.map(|file| Source::new(format!("/sys/{file}"), "not there")))
}

/// Distributions lock 64 KiB or 8 MiB by default. The queues of some connections and one pool of buffers are more than that.
const SOME_MEMORY: u64 = 64 << 20;

/// `CAP_IPC_LOCK`, with which no limit counts.
const IPC_LOCK: u64 = 1 << 14;

/// How much memory can be locked.
pub(in crate::doctor) fn memlock(files: &Files) -> Finding {
    const LINE: &str = "Max locked memory";
    let advice =
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in the service, --ulimit memlock=-1 for a container";
    let (limits, status) = (files.proc("self/limits"), files.proc("self/status"));
    let Some(line) = limits.line(LINE) else {
        return Finding::unknown(Link::Memlock, "the limit is not to be read", advice).told_by(limits.source());
    };
    let mut words = line.trim_start_matches(LINE).split_whitespace();
    let (soft, hard) = (words.next().unwrap_or("?"), words.next().unwrap_or("?"));
    let shown = |text: &str| text.parse().map_or_else(|_| text.to_owned(), bytes);
    let value = format!("soft {}, hard {}", shown(soft), shown(hard));
    let source = limits.showing(line);
    let capabilities = status.line("CapEff:");
    let mask = capabilities.and_then(|line| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok());
    if mask.is_some_and(|mask| mask & IPC_LOCK != 0) {
        let source = [source].into_iter().chain(capabilities.map(|line| status.showing(line)));
        return Finding::ok(Link::Memlock, format!("{value}, but CAP_IPC_LOCK lifts it")).told_by_all(source);
    }
    match (soft, soft.parse::<u64>()) {
        ("unlimited", _) => Finding::ok(Link::Memlock, value).told_by(source),
        (_, Ok(soft)) if soft >= SOME_MEMORY => Finding::ok(Link::Memlock, value).told_by(source),
        (_, Ok(_)) => Finding::broken(Link::Memlock, value, advice).told_by(source),
        (_, Err(_)) => Finding::unknown(Link::Memlock, value, advice).told_by(source),
    }
}

/// The kernel's release, and what it lacks.
pub(in crate::doctor) fn kernel(files: &Files) -> Finding {
    let release = files.proc("sys/kernel/osrelease");
    let Some(text) = release.get() else {
        return Finding::unknown(Link::Kernel, "its release is not to be read", "look at `uname -r`")
            .told_by(release.source());
    };
    let mut numbers = text.split(|it: char| !it.is_ascii_digit()).map(|it| it.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let finding = Finding::ok(Link::Kernel, text).told_by(release.source());
    match version < (5, 12) {
        true => finding.remark("NICs register dma-bufs since Linux 5.12: before, only nvidia-peermem goes"),
        false => finding,
    }
}
