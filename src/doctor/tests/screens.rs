//! The text of whole machines.

use std::fs;
use std::path::Path;

use super::fixture::{Fixture, REDIRECT};
use crate::doctor::finding::{Link, Source, Status};
use crate::doctor::live::{Cuda, Live};
use crate::doctor::{Finding, GpuDirectReport};
use crate::topology::Topology;

/// Compares with the file of that name; with `GOLDEN=write` in the environment, writes it.
#[track_caller]
fn assert_screen(name: &str, report: &GpuDirectReport) {
    let text = if name.starts_with("sources") { format!("{report:#}") } else { report.to_string() };
    assert!(text.is_ascii(), "{text}");
    let chain = text.split("chain between").nth(1).unwrap();
    assert!(chain.lines().count() <= 50 || name.starts_with("sources"), "{text}");
    for line in chain.lines().filter(|line| line.split_whitespace().count() > 3) {
        assert!(line.len() <= 80, "{line:?}");
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/doctor/tests/screens").join(name);
    if std::env::var_os("GOLDEN").is_some_and(|it| it == "write") {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, &text).unwrap();
    }
    let expected = fs::read_to_string(&file).unwrap();
    assert!(text == expected, "{} is, and should be:\n{text}\n{expected}", file.display());
}

#[test]
fn all_is_well() {
    let report = Fixture::healthy().report();
    assert!(report.chain.holds());
    assert_screen("healthy.txt", &report);
    assert_screen("sources.txt", &report);
}

/// Bridges redirect, and the IOMMU translates.
pub fn broken_twice() -> GpuDirectReport {
    let machine = Fixture::small();
    let [_, _, down, other, gpu, nic] = Fixture::pair_addresses(0);
    [down, other].iter().for_each(|port| machine.config(port, Some(REDIRECT), false));
    machine.iommu(&gpu, 40, "DMA-FQ");
    machine.iommu(&nic, 41, "DMA-FQ");
    machine.report()
}

#[test]
fn bridges_redirect_and_the_iommu_translates() {
    let report = broken_twice();
    let faults: Vec<_> = report.chain.faults().map(|it| it.link).collect();
    assert_eq!(faults, [Link::Acs, Link::Iommu]);
    assert_screen("acs_and_iommu.txt", &report);
}

#[test]
fn neither_route() {
    let mut machine = Fixture::small();
    machine.remove("sys/module");
    machine.cuda().attributes[6] = Ok(0);
    machine
        .write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun 6\n");
    machine.opened().dma_buf = Err(Source::new("ibv_reg_dmabuf_mr(fd = -1)", "errno 95 (EOPNOTSUPP)"));
    let report = machine.report();
    let faults: Vec<_> = report.chain.faults().map(|it| it.link).collect();
    assert_eq!(faults, [Link::DmaBufExport, Link::DmaBufImport, Link::PeerMemory]);
    assert_screen("neither_route.txt", &report);
}

/// A virtual machine that shows each device in a PCI domain of its own, to somebody who is not root.
fn flattened() -> Fixture {
    let machine = Fixture::single();
    let [_, up, down, other, gpu, nic] = Fixture::pair_addresses(0);
    for address in [&up, &down, &other, &gpu, &nic] {
        machine.remove(&format!("sys/bus/pci/devices/{address}"));
    }
    for (address, host) in [(&gpu, "pci0001:00"), (&nic, "pci0101:00")] {
        machine.move_to(address, host);
        machine.cut_config(address);
    }
    machine
}

#[test]
fn flattened_and_not_root() {
    let report = flattened().report();
    let faults: Vec<_> = report.chain.faults().map(|it| (it.link, it.status)).collect();
    assert_eq!(faults, [(Link::Level, Status::Unknown), (Link::Acs, Status::Unknown)]);
    assert_screen("flattened.txt", &report);
}

/// The file says how near they are, and nothing of bridges that nobody sees.
#[test]
fn an_override_tells_the_level_alone() {
    let machine = flattened();
    let [.., gpu, _] = Fixture::pair_addresses(0);
    let file = machine.path("override");
    for (level, faults) in [("PIX", &[Link::Acs][..]), ("PHB", &[]), ("SYS", &[Link::Level])] {
        fs::write(&file, format!("# the provider's word\n{gpu} mlx5_0 {level}\n")).unwrap();
        let topology = Topology::read_from(machine.path("sys")).unwrap().with_overrides(&file).unwrap();
        let chain = machine.report_on(&topology, "0", "mlx5_0").unwrap().chain;
        assert_eq!(chain.faults().map(|it| it.link).collect::<Vec<_>>(), faults, "{chain:#}");
        let found = chain.finding(Link::Level).unwrap();
        assert!(
            found.value.starts_with(level)
                && found.value.contains("override")
                && found.sources[0].asked.contains("line 2")
        );
    }
}

#[test]
fn neither_gpu_nor_nic() {
    let report = Fixture::bare().report();
    let text = report.to_string();
    assert!(text.contains("no GPU") && text.contains("no RDMA device") && !report.chain.holds(), "{text}");
    assert!(text.lines().count() <= 40, "{text}");
    assert_screen("neither.txt", &report);
}

#[test]
fn from_files_alone_nothing_is_claimed_of_drivers() {
    let machine = Fixture::healthy();
    let (sys, proc) = (machine.path("sys"), machine.path("proc"));
    let report = GpuDirectReport::builder().gpu("0").nic("mlx5_0").files(&sys, &proc).build().unwrap();
    let of_drivers =
        [Link::CudaDriver, Link::MemoryKind, Link::Visibility, Link::Verbs, Link::DmaBufImport, Link::CpuCopies];
    for link in of_drivers {
        let finding: &Finding = report.chain.finding(link).unwrap();
        assert_eq!(finding.status, Status::Unknown, "{finding:?}");
    }
    assert_eq!(report.chain.finding(Link::Acs).unwrap().status, Status::Ok);
    assert!(!report.chain.holds());
    assert!(GpuDirectReport::builder().files("/nonexistent/sys", &proc).build().is_err());
    let empty = tempfile::tempdir().unwrap();
    let report = GpuDirectReport::builder().files(empty.path(), empty.path()).build().unwrap();
    assert!(!report.chain.holds() && report.gpus.is_empty() && report.nics.is_empty());
}

/// As in a container that was given one of the GPUs.
#[test]
fn a_gpu_that_cuda_shows_comes_first() {
    let mut machine = Fixture::small();
    if let Cuda::Found { gpus, .. } = &mut machine.live.cuda {
        gpus.remove(0);
    }
    let topology = Topology::read_from(machine.path("sys")).unwrap();
    let examine = |live: Live| GpuDirectReport::builder().examine(&topology, &machine.files(), live, |_, _, _| {});
    let report = examine(machine.live.clone()).unwrap();
    assert_eq!(report.chain.gpu.unwrap(), "GPU1");
    assert_eq!(report.chain.nic.unwrap(), "mlx5_1");
    let report = examine(Live { cuda: Cuda::NoFeature, ..machine.live.clone() }).unwrap();
    assert_eq!(report.chain.gpu.unwrap(), "GPU0");
}

#[test]
fn each_gpu_gets_the_nic_beside_it_by_itself() {
    let machine = Fixture::healthy();
    let (sys, proc) = (machine.path("sys"), machine.path("proc"));
    for number in 0..8 {
        let report = GpuDirectReport::builder().gpu(number.to_string()).files(&sys, &proc).build().unwrap();
        assert_eq!(report.chain.nic.unwrap(), format!("mlx5_{number}"));
        assert_eq!(report.matrix.levels[number][8 + number], "PIX");
        assert_eq!(report.matrix.levels[number][number], "X");
    }
}
