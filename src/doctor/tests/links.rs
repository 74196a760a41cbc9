//! Each link, in each status it can have.

use proptest::prelude::*;

use super::fixture::{Fixture, REDIRECT};
use crate::doctor::finding::{Finding, Link, Source, Status};
use crate::doctor::live::{Cuda, Verbs};

// The first pair's, as the fixture has them.
const ROOT: &str = "0000:00:01.0";
const UP: &str = "0000:01:00.0";
const DOWN: &str = "0000:02:01.0";
const GPU: &str = "0000:03:00.0";
const NIC: &str = "0000:04:00.0";

/// What a changed machine says of the link: the status, and words of its value, source or advice.
#[track_caller]
fn check(link: Link, status: Status, words: &[&str], change: impl FnOnce(&mut Fixture)) -> Finding {
    let mut machine = Fixture::single();
    change(&mut machine);
    let finding = machine.finding(link);
    assert_eq!(finding.status, status, "{finding:?}");
    let text = format!("{finding:?}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    assert!(!finding.value.is_empty());
    if status != Status::Ok {
        assert!(!finding.advice.is_empty(), "{finding:?}");
        assert!(finding.advice.len() < 200 && finding.advice.matches(". ").count() < 2, "{}", finding.advice);
    }
    finding
}

use Status::{Broken, Ok as Fine, Unknown};

#[test]
fn a_healthy_machine_holds_by_both_routes() {
    let report = Fixture::healthy().report();
    assert!(report.chain.holds(), "{report}");
    assert_eq!(report.chain.routes().len(), 2);
    let links: Vec<_> = report.chain.findings.iter().map(|it| it.link).collect();
    assert_eq!(links, Link::ALL, "each link, in order");
    assert!(report.chain.findings.iter().all(|it| it.status == Fine && it.advice.is_empty()), "{report}");
}

#[test]
fn the_gpu_and_its_driver() {
    check(Link::Gpu, Fine, &["H200", GPU, "s: 1"], |_| {});
    check(Link::CudaDriver, Fine, &["13.0", "13000"], |_| {});
    check(Link::CudaDriver, Unknown, &["no feature `cuda`", "--features cuda"], |it| it.live.cuda = Cuda::NoFeature);
    check(Link::CudaDriver, Unknown, &["of files"], |it| it.live.cuda = Cuda::NotAsked);
    check(Link::CudaDriver, Broken, &["no such file"], |it| it.live.cuda = Cuda::Failed("no such file".into()));
    check(Link::KernelModule, Fine, &["open, 580.159.03", "NVRM"], |_| {});
    check(Link::KernelModule, Fine, &["proprietary, 535.54.03", "dma-buf"], |it| {
        it.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun 6\n",
        );
    });
    check(Link::KernelModule, Unknown, &["not there", "/proc/driver/nvidia/version"], |it| it.remove("proc/driver"));
    check(Link::KernelModule, Unknown, &[], |it| it.write("proc/driver/nvidia/version", [0xff, 0, b'\n']));
}

#[test]
fn memory_of_the_gpu() {
    check(Link::MemoryKind, Fine, &["gpuDirectRDMACapable", "refused: ", "pool"], |_| {});
    check(Link::MemoryKind, Unknown, &["not tried"], |it| it.cuda().memory = None);
    check(Link::MemoryKind, Broken, &["OUT_OF_MEMORY"], |it| it.cuda().memory = Some(Err("OUT_OF_MEMORY".into())));
    check(Link::MemoryKind, Broken, &["unfit"], |it| {
        it.cuda().memory.as_mut().unwrap().as_mut().unwrap().fit = false;
    });
    check(Link::MemoryKind, Unknown, &["--features cuda"], |it| it.live.cuda = Cuda::NoFeature);
    check(Link::MemoryKind, Unknown, &["CUDA_VISIBLE_DEVICES"], |it| {
        it.live.cuda = Cuda::Found { version: 13000, gpus: Vec::new() };
    });
    check(Link::MappedMemory, Fine, &["= 110", "yes"], |_| {});
    check(Link::MappedMemory, Fine, &["cuMemAlloc"], |it| it.cuda().attributes[2] = Ok(0));
    check(Link::MappedMemory, Unknown, &["CUDA error 1", "newer"], |it| it.cuda().attributes[1] = Err(1));
    check(Link::Bar1, Fine, &["256 GiB, for 139.8 GiB", "0x0000213fffffffff"], |_| {});
    let resource = format!("sys/bus/pci/devices/{GPU}/resource");
    let small = "0x1000 0x1fff 0x40200\n0x10000000 0x1fffffff 0x14220c\n";
    check(Link::Bar1, Broken, &["256 MiB, for", "Resizable BAR"], |it| it.write(&resource, small));
    check(Link::Bar1, Broken, &["256 MiB"], |it| {
        it.write(&resource, small);
        it.live.cuda = Cuda::NoFeature;
    });
    check(Link::Bar1, Unknown, &["256 GiB", "not known"], |it| it.live.cuda = Cuda::NoFeature);
    check(Link::Bar1, Unknown, &["not to be read"], |it| it.remove(&resource));
    for garbage in ["", "0x 0x 0x", "zzz", "0x0 0xffffffffffffffff 0x2000\n", "0xff 0x1 0x2000"] {
        let mut machine = Fixture::single();
        machine.write(&resource, garbage);
        machine.live.cuda = Cuda::NoFeature;
        assert_ne!(machine.finding(Link::Bar1).status, Fine, "{garbage:?}");
    }
}

#[test]
fn what_the_gpu_sees() {
    check(Link::Visibility, Fine, &["native", "WRITES_ORDERING = 118", "100", "FLUSH_WRITES_OPTIONS = 117"], |_| {});
    check(Link::Visibility, Broken, &["a Read", "staging"], |it| it.cuda().visibility = Err("a Read would".into()));
    check(Link::Visibility, Unknown, &["CUDA error 1"], |it| it.cuda().attributes[5] = Err(1));
    check(Link::Visibility, Unknown, &["--features cuda"], |it| it.live.cuda = Cuda::NoFeature);
}

#[test]
fn routes() {
    check(Link::DmaBufExport, Fine, &["DMA_BUF_SUPPORTED = 124", "\"1\""], |_| {});
    check(Link::DmaBufExport, Broken, &["open kernel modules"], |it| it.cuda().attributes[6] = Ok(0));
    check(Link::DmaBufExport, Unknown, &["CUDA error 1"], |it| it.cuda().attributes[6] = Err(1));
    check(Link::DmaBufImport, Fine, &["EBADF"], |_| {});
    check(Link::DmaBufImport, Broken, &["EOPNOTSUPP", "5.12"], |it| {
        it.opened().dma_buf = Err(Source::new("ibv_reg_dmabuf_mr(fd = -1)", "errno 95 (EOPNOTSUPP)"));
    });
    check(Link::DmaBufImport, Unknown, &["of files"], |it| it.live.verbs = Verbs::NotAsked);
    check(Link::DmaBufImport, Unknown, &["not opened"], |it| it.live.verbs = Verbs::Loaded(Some(Err("denied".into()))));
    check(Link::GpuDirect, Fine, &["GPU_DIRECT_RDMA_SUPPORTED = 116"], |_| {});
    check(Link::GpuDirect, Broken, &["vGPU"], |it| it.cuda().attributes[3] = Ok(0));
    check(Link::GpuDirect, Unknown, &["--features cuda"], |it| it.live.cuda = Cuda::NoFeature);
    check(Link::PeerMemory, Fine, &["nvidia_peermem 580.159.03"], |_| {});
    check(Link::PeerMemory, Broken, &["modprobe nvidia-peermem", "nv_mem_nc", "not there"], |it| {
        it.remove("sys/module")
    });
    for module in ["kernel/mm/memory_peers/nv_mem", "kernel/mm/memory_peers/nv_mem_nc", "module/nv_peer_mem"] {
        check(Link::PeerMemory, Fine, &["1.1-0", module], |it| {
            it.remove("sys/module");
            it.write(&format!("sys/{module}/version"), "1.1-0");
        });
    }
}

#[test]
fn the_nic() {
    check(Link::Nic, Fine, &["mlx5_0", NIC, "mlx5_core", "devices: 1"], |_| {});
    check(Link::Verbs, Fine, &["rdma-core 50.0", "opens the device"], |_| {});
    check(Link::Verbs, Broken, &["modprobe ib_uverbs", "errno 38"], |it| {
        it.live.verbs = Verbs::Failed("errno 38".into())
    });
    check(Link::Verbs, Broken, &["install rdma-core", "no such file"], |it| {
        it.remove("proc/self/maps");
        it.live.verbs = Verbs::Failed("no such file".into());
    });
    check(Link::Verbs, Broken, &["denied", "/dev/infiniband"], |it| {
        it.live.verbs = Verbs::Loaded(Some(Err("denied".into())))
    });
    check(Link::Verbs, Unknown, &["of files"], |it| it.live.verbs = Verbs::NotAsked);
    let port = "sys/class/infiniband/mlx5_0/ports/1";
    check(Link::Port, Fine, &["400 Gb/sec", "Ethernet", "4: ACTIVE"], |_| {});
    check(Link::Port, Broken, &["1: DOWN", "ip link set"], |it| it.write(&format!("{port}/state"), "1: DOWN"));
    check(Link::Port, Unknown, &["no state"], |it| it.remove(&format!("{port}/state")));
    check(Link::Port, Unknown, &["no port"], |it| it.remove("sys/class/infiniband/mlx5_0/ports"));
    check(Link::Port, Fine, &["port 2"], |it| {
        it.write(&format!("{port}/state"), "1: DOWN");
        it.write("sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE");
    });
    check(Link::Mtu, Fine, &["4096 of 4096 B"], |_| {});
    check(Link::Mtu, Fine, &["1024 of 4096 B", "9000"], |it| it.opened().active_mtu = 1024);
    check(Link::Mtu, Unknown, &["of files"], |it| it.live.verbs = Verbs::NotAsked);
    check(Link::CpuCopies, Fine, &["MLX5_SCATTER_TO_CQE"], |_| {});
    for value in [None, Some("1".to_owned())] {
        check(Link::CpuCopies, Broken, &["MLX5_SCATTER_TO_CQE=0"], |it| it.live.scatter_to_cqe = value);
    }
    check(Link::CpuCopies, Fine, &["none", "efa"], |it| it.driver(NIC, "efa"));
    check(Link::CpuCopies, Unknown, &["environment"], |it| it.live.verbs = Verbs::NotAsked);
}

#[test]
fn addresses_of_the_port() {
    let gids = "sys/class/infiniband/mlx5_0/ports/1/gids";
    let types = "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types";
    check(Link::Gid, Fine, &["index 1", "RoCE v2", "10.1.1.1", "eth0", "2 entries, 1 usable"], |_| {});
    check(Link::Gid, Broken, &["link-local", "ip addr add"], |it| it.remove(&format!("{gids}/1")));
    check(Link::Gid, Broken, &["RoCE v2"], |it| {
        it.write(&format!("{types}/0"), "IB/RoCE v1");
        it.write(&format!("{types}/1"), "IB/RoCE v1");
    });
    check(Link::Gid, Broken, &["no address"], |it| it.remove(gids));
    check(Link::Gid, Fine, &["fe80"], |it| {
        it.write("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
        it.remove(&format!("{gids}/1"));
    });
    check(Link::Gid, Fine, &["2001:db8::1", "index 3"], |it| {
        it.remove(&format!("{gids}/1"));
        it.write(&format!("{gids}/3"), "2001:0db8:0000:0000:0000:0000:0000:0001");
        it.write(&format!("{types}/3"), "RoCE v2");
    });
    check(Link::Gid, Broken, &["no address"], |it| {
        it.remove(gids);
        it.write(&format!("{gids}/0"), [0xff, 0xfe, b'\n']);
    });
    check(Link::Gid, Unknown, &["no port"], |it| it.remove("sys/class/infiniband/mlx5_0/ports"));
}

#[test]
fn the_way() {
    let level = |nic, status, words: &[&str]| {
        let report = Fixture::small().report_of("GPU0", nic).unwrap();
        let finding = report.chain.finding(Link::Level).unwrap();
        assert_eq!(finding.status, status);
        words.iter().for_each(|word| assert!(format!("{finding:?}").contains(word), "no {word} in {finding:?}"));
        report.chain.finding(Link::Numa).unwrap().clone()
    };
    assert_eq!(level("mlx5_0", Fine, &["PIX"]).status, Fine);
    assert_eq!(level("mlx5_1", Fine, &["NODE", "PIX or PXB"]).status, Fine);
    let numa = level("mlx5_7", Broken, &["SYS", "NUMA node"]);
    assert!(numa.status == Broken && numa.value.contains("node 0") && numa.value.contains("node 1"));
    check(Link::Level, Unknown, &["TOKIO_RDMA_TOPOLOGY"], |it| it.remove(&format!("sys/bus/pci/devices/{GPU}")));
    check(Link::Numa, Unknown, &["-1"], |it| it.write(&format!("sys/bus/pci/devices/{GPU}/numa_node"), "-1"));

    check(Link::Acs, Fine, &["on the way: 3", UP, "0x0000"], |_| {});
    check(Link::Acs, Broken, &[DOWN, "0x001d", "setpci", "virtual machine"], |it| {
        it.config(DOWN, Some(REDIRECT), false)
    });
    check(Link::Acs, Fine, &[], |it| it.config(ROOT, Some(REDIRECT), false));
    check(Link::Acs, Unknown, &["not root", "64 bytes", "as root"], |it| it.cut_config(UP));
    // One that redirects is enough, whatever is not known of others.
    check(Link::Acs, Broken, &["0x001d"], |it| {
        it.cut_config(UP);
        it.config(DOWN, Some(REDIRECT), false);
    });
    let far = Fixture::small();
    far.config(DOWN, Some(REDIRECT), false);
    let acs = far.report_of("0", "mlx5_1").unwrap().chain.finding(Link::Acs).unwrap().clone();
    assert!(acs.status == Fine && acs.value.contains("root complex"), "{acs:?}");

    check(Link::Iommu, Fine, &["none takes part", "not there"], |_| {});
    let both = |kind: &'static str| {
        move |it: &mut Fixture| [(GPU, 7), (NIC, 8)].iter().for_each(|(at, group)| it.iommu(at, *group, kind))
    };
    check(Link::Iommu, Fine, &["pass-through", "iommu_groups/7/type", "identity"], both("identity"));
    check(Link::Iommu, Broken, &["DMA-FQ", "iommu=pt"], both("DMA-FQ"));
    check(Link::Iommu, Broken, &["blocked"], both("blocked"));
    check(Link::Iommu, Unknown, &["odd"], both("odd"));
    check(Link::Iommu, Broken, &["DMA"], |it| it.iommu(NIC, 8, "DMA"));
    check(Link::Ats, Fine, &["on"], |_| {});
    check(Link::Ats, Fine, &["off"], |it| it.config(NIC, None, false));
    check(Link::Ats, Unknown, &["64 bytes", "root"], |it| it.cut_config(NIC));
}

#[test]
fn the_machine_and_the_process() {
    let limits = |soft: &str, hard: &str| {
        format!("Limit  Soft Limit  Hard Limit  Units\nMax locked memory   {soft}   {hard}   bytes\n")
    };
    check(Link::Memlock, Fine, &["unlimited"], |_| {});
    check(Link::Memlock, Fine, &["soft 1 GiB, hard unlimited"], |it| {
        it.write("proc/self/limits", limits("1073741824", "unlimited"))
    });
    check(Link::Memlock, Broken, &["soft 8 MiB, hard 8 MiB", "ulimit -l", "LimitMEMLOCK"], |it| {
        it.write("proc/self/limits", limits("8388608", "8388608"));
    });
    check(Link::Memlock, Fine, &["CAP_IPC_LOCK", "CapEff"], |it| {
        it.write("proc/self/limits", limits("65536", "65536"));
        it.write("proc/self/status", "CapEff:\t000001ffffffffff\n");
    });
    check(Link::Memlock, Unknown, &["not to be read"], |it| it.remove("proc/self/limits"));
    check(Link::Memlock, Unknown, &[], |it| it.write("proc/self/limits", "Max locked memory what ever"));
    check(Link::Kernel, Fine, &["6.8.0-45-generic"], |_| {});
    check(Link::Kernel, Fine, &["5.4.0", "5.12"], |it| it.write("proc/sys/kernel/osrelease", "5.4.0-100"));
    check(Link::Kernel, Unknown, &["uname"], |it| it.remove("proc/sys"));
}

#[test]
fn a_machine_with_one_half_tells_of_that_half() {
    let mut machine = Fixture::small();
    machine.remove("sys/class/infiniband");
    machine.live.verbs = Verbs::Loaded(None);
    let chain = machine.report().chain;
    assert_eq!(chain.finding(Link::Nic).unwrap().status, Broken);
    assert!(chain.finding(Link::Gid).is_none() && chain.finding(Link::DmaBufExport).is_some() && !chain.holds());
    let mut machine = Fixture::small();
    [0, 1, 7].into_iter().for_each(|number| {
        let [.., gpu, _] = Fixture::pair_addresses(number);
        machine.remove(&format!("sys/bus/pci/devices/{gpu}"));
    });
    machine.live.cuda = Cuda::Failed("none".into());
    let chain = machine.report().chain;
    assert_eq!(chain.finding(Link::Gpu).unwrap().status, Broken);
    assert!(chain.finding(Link::Gid).is_some() && chain.finding(Link::Bar1).is_none() && !chain.holds());
}

#[test]
fn what_is_asked_for_and_not_there_is_an_error_that_lists_what_is() {
    let machine = Fixture::small();
    for name in ["9", "GPU9", "0000:99:00.0", "", "x", "mlx5_0"] {
        let text = machine.report_of(name, "mlx5_0").unwrap_err().to_string();
        assert!(text.contains(&format!("no GPU {name:?}")) && text.contains("GPU2 at 0000:73:00.0"), "{text}");
    }
    let text = machine.report_of("0", "mlx4_0").unwrap_err().to_string();
    assert!(text.contains("mlx4_0") && text.contains("mlx5_7"), "{text}");
    for name in ["1", "GPU1", "0000:13:00.0", "00000000:13:00.0"] {
        assert_eq!(machine.report_of(name, "mlx5_1").unwrap().chain.gpu.unwrap(), "GPU1");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever stands in the files: a report comes of it, and no file that is none makes a link hold.
    #[test]
    fn no_file_panics(bytes in prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), "[ -~\n]{0,200}".prop_map(String::into_bytes)]) {
        let mut machine = Fixture::single();
        machine.live.cuda = Cuda::NoFeature;
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        for file in [
            "proc/driver/nvidia/version".to_owned(),
            "proc/self/limits".to_owned(),
            "proc/self/status".to_owned(),
            "proc/self/maps".to_owned(),
            "proc/sys/kernel/osrelease".to_owned(),
            format!("sys/bus/pci/devices/{GPU}/resource"),
            format!("sys/bus/pci/devices/{GPU}/numa_node"),
            format!("sys/bus/pci/devices/{UP}/config"),
            format!("{port}/state"),
            format!("{port}/rate"),
            format!("{port}/link_layer"),
            format!("{port}/gids/0"),
            format!("{port}/gids/1"),
            format!("{port}/gid_attrs/types/0"),
        ] {
            machine.write(&file, &bytes);
        }
        let report = machine.report();
        prop_assert!(!report.chain.holds());
        for link in [Link::Memlock, Link::Gid] {
            prop_assert_ne!(report.chain.finding(link).unwrap().status, Fine, "{}", report);
        }
        prop_assert!(!report.to_string().is_empty());
    }
}
