//! Links that are about the GPU and its driver.

use crate::doctor::files::Files;
use crate::doctor::finding::{Finding, Link, Source};
use crate::doctor::live::{Cuda, CudaGpu};
use crate::doctor::report::Gpu;
use crate::doctor::units::bytes;

const BUILD: &str = "build with the feature: cargo run --release --features cuda --example doctor";
const DRIVER: &str =
    "install NVIDIA's driver (libcuda.so.1 is part of it), in a container by way of the NVIDIA container toolkit";

/// Whether there is one.
pub(in crate::doctor) fn gpu(gpu: Option<&Gpu>, count: usize) -> Finding {
    match gpu {
        Some(gpu) => {
            let model = gpu.model.as_deref().unwrap_or("a GPU of NVIDIA's");
            Finding::ok(Link::Gpu, format!("{}: {model} at {}", gpu.name, gpu.pci_address))
                .told_by(Source::new("/sys/bus/pci/devices", format!("GPUs of NVIDIA's: {count}")))
        }
        None => Finding::broken(
            Link::Gpu,
            "no GPU",
            "no PCI function is a display device of NVIDIA's: use a machine with a GPU, or pass the GPU to this virtual machine",
        )
        .told_by(Source::new("/sys/bus/pci/devices", "none of vendor 0x10de and class 0x03")),
    }
}

/// Whether CUDA's driver library is there.
pub(in crate::doctor) fn cuda_driver(cuda: &Cuda) -> Finding {
    match cuda {
        Cuda::NoFeature => Finding::unknown(Link::CudaDriver, "this build has no feature `cuda`", BUILD),
        Cuda::NotAsked => Finding::unknown(Link::CudaDriver, NOT_ASKED, THERE),
        Cuda::Failed(reason) => Finding::broken(Link::CudaDriver, "no CUDA driver can be used", DRIVER)
            .told_by(Source::new("dlopen(libcuda.so.1), cuInit", reason)),
        Cuda::Found { version, gpus } => {
            let shown =
                format!("libcuda.so.1 of CUDA {}.{} shows GPUs: {}", version / 1000, version % 1000 / 10, gpus.len());
            Finding::ok(Link::CudaDriver, shown).told_by(Source::new("cuDriverGetVersion", version.to_string()))
        }
    }
}

/// Why CUDA was not asked, where files of another machine are read.
pub(in crate::doctor) const NOT_ASKED: &str = "not asked: the report is of files";
const THERE: &str = "run it on the machine itself";

/// Which modules of the kernel drive it.
pub(in crate::doctor) fn kernel_module(files: &Files) -> Finding {
    let version = files.proc("driver/nvidia/version");
    let Some(line) = version.line("NVRM version") else {
        return Finding::unknown(
            Link::KernelModule,
            "no kernel module of NVIDIA's shows itself",
            "load the kernel module nvidia; a container may hide /proc/driver/nvidia",
        )
        .told_by(version.source());
    };
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|it| it.is_ascii_digit() || it == '.');
    let number = line.split_whitespace().find(is_version).unwrap_or("of unknown version");
    if line.contains("Open Kernel Module") {
        return Finding::ok(Link::KernelModule, format!("open, {number}")).told_by(version.showing(line));
    }
    Finding::ok(Link::KernelModule, format!("proprietary, {number}"))
        .told_by(version.showing(line))
        .remark("the open kernel modules (GPUs since Turing) export dma-bufs, which these do not: one route less")
}

/// The GPU as CUDA shows it, or why it is not asked.
struct Asked<'a>(Result<&'a CudaGpu, (&'static str, &'static str)>);

impl<'a> Asked<'a> {
    fn new(cuda: &'a Cuda, gpu: &Gpu) -> Self {
        let shown = cuda.gpus().iter().find(|it| Some(it.ordinal) == gpu.cuda_ordinal);
        Self(shown.ok_or(match cuda {
            Cuda::NoFeature => ("this build has no feature `cuda`", BUILD),
            Cuda::NotAsked => (NOT_ASKED, THERE),
            Cuda::Failed(_) => ("nobody to ask without a CUDA driver", DRIVER),
            Cuda::Found { .. } => {
                ("CUDA does not show this GPU to the process", "look at CUDA_VISIBLE_DEVICES, and at MIG")
            }
        }))
    }

    /// An attribute of it.
    fn attribute(&self, link: Link, number: i32) -> Result<(i32, Source), Finding> {
        let gpu = self.0.map_err(|(value, advice)| Finding::unknown(link, value, advice))?;
        match gpu.attribute(number) {
            (Ok(value), source) => Ok((value, source)),
            (Err(_), source) => {
                let advice = "the installed driver does not know the attribute: install a newer one";
                Err(Finding::unknown(link, "the driver does not say", advice).told_by(source))
            }
        }
    }
}

/// What memory a `GpuBuffer` is made of.
pub(in crate::doctor) fn memory_kind(cuda: &Cuda, gpu: &Gpu) -> Finding {
    let link = Link::MemoryKind;
    let found = match Asked::new(cuda, gpu).0 {
        Err((value, advice)) => return Finding::unknown(link, value, advice),
        Ok(gpu) => match &gpu.memory {
            None => return Finding::unknown(link, "not tried: no context on this GPU was made", THERE),
            Some(Err(error)) => {
                let advice = "free memory of the GPU, or look at what else the driver says (nvidia-smi, dmesg)";
                return Finding::broken(link, "no memory of the GPU can be had", advice)
                    .told_by(Source::new("GpuBuffer::alloc", error));
            }
            Some(Ok(found)) => found,
        },
    };
    let refused =
        if found.refused.is_empty() { String::new() } else { format!("; refused: {}", found.refused.join(", ")) };
    let value = format!("a GpuBuffer gets {}{refused}", found.kind);
    let finding = if found.fit {
        Finding::ok(link, value)
    } else {
        Finding::broken(
            link,
            value,
            "the driver calls it unfit for GPUDirect RDMA: use a data-centre or professional GPU",
        )
    };
    finding.told_by_all(found.sources.iter().cloned())
}

/// Whether that memory is of the kind that is mapped.
pub(in crate::doctor) fn mapped_memory(cuda: &Cuda, gpu: &Gpu) -> Finding {
    let (link, asked) = (Link::MappedMemory, Asked::new(cuda, gpu));
    let value = asked.attribute(link, 102).and_then(|maps| Ok((maps, asked.attribute(link, 110)?)));
    match value {
        Err(unknown) => unknown,
        Ok(((maps, first), (for_nics, second))) => {
            let finding = if maps != 0 && for_nics != 0 {
                Finding::ok(link, "yes: giving memory back holds up nobody")
            } else {
                Finding::ok(link, "no: memory comes from cuMemAlloc").remark(
                    "freeing such memory waits for all the work of the GPU: keep buffers instead of freeing them",
                )
            };
            finding.told_by_all([first, second])
        }
    }
}

/// Whether the whole of its memory can be reached from the bus.
pub(in crate::doctor) fn bar1(files: &Files, gpu: &Gpu) -> Finding {
    let resource = files.sys(&format!("bus/pci/devices/{}/resource", gpu.pci_address));
    let Some((line, bar)) = largest_bar(resource.get().unwrap_or_default()) else {
        let advice = "look at `lspci -vv` as root: has the firmware given the GPU its memory regions?";
        return Finding::unknown(Link::Bar1, "its size is not to be read", advice).told_by(resource.source());
    };
    let source = resource.showing(line);
    let advice = "turn on Above 4G Decoding and Resizable BAR in the firmware, or register less than that at a time";
    match gpu.memory_bytes {
        Some(memory) if bar < memory => {
            let value = format!("{}, for {} of memory", bytes(bar), bytes(memory));
            Finding::broken(Link::Bar1, value, advice).told_by(source)
        }
        Some(memory) => {
            Finding::ok(Link::Bar1, format!("{}, for {} of memory", bytes(bar), bytes(memory))).told_by(source)
        }
        // No GPU with less memory does GPUDirect RDMA.
        None if bar <= SMALL_BAR => Finding::broken(Link::Bar1, bytes(bar), advice).told_by(source),
        None => {
            let value = format!("{}; how much memory the GPU has is not known", bytes(bar));
            Finding::unknown(Link::Bar1, value, "compare it with the memory that nvidia-smi shows").told_by(source)
        }
    }
}

/// What GPUs have whose memory the firmware does not map as a whole.
const SMALL_BAR: u64 = 256 << 20;

/// The largest prefetchable region of a `resource` file, whose lines are start, end and flags: the window into the memory.
/// The size is that of the line.
fn largest_bar(text: &str) -> Option<(&str, u64)> {
    const PREFETCHABLE: u64 = 0x2000;
    let bars = text.lines().take(6).filter_map(|line| {
        let mut numbers = line.split_whitespace().map(|it| u64::from_str_radix(it.trim_start_matches("0x"), 16));
        let (start, end, flags) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        (flags & PREFETCHABLE != 0 && end > start).then(|| (line, (end - start).saturating_add(1)))
    });
    bars.max_by_key(|(_, size)| *size)
}

/// How what a NIC wrote becomes visible.
pub(in crate::doctor) fn visibility(cuda: &Cuda, gpu: &Gpu) -> Finding {
    let (link, asked) = (Link::Visibility, Asked::new(cuda, gpu));
    let mut sources = Vec::new();
    for number in [118, 117, 100] {
        match asked.attribute(link, number) {
            Ok((_, source)) => sources.push(source),
            Err(unknown) => return unknown.told_by_all(sources),
        }
    }
    let finding = match asked.0.map(|gpu| &gpu.visibility) {
        Err((value, advice)) => Finding::unknown(link, value, advice),
        Ok(Ok(rule)) => Finding::ok(link, rule),
        Ok(Err(rule)) => Finding::broken(
            link,
            rule,
            "direct paths are refused there: allow staging (PathPolicy::AllowStaging), whose copies the GPU orders itself",
        ),
    };
    finding.told_by_all(sources)
}

/// Whether its driver exports dma-bufs.
pub(in crate::doctor) fn dma_buf_export(cuda: &Cuda, gpu: &Gpu) -> Finding {
    match Asked::new(cuda, gpu).attribute(Link::DmaBufExport, 124) {
        Err(unknown) => unknown,
        Ok((0, source)) => Finding::broken(
            Link::DmaBufExport,
            "the GPU's driver exports no dma-bufs",
            "install the open kernel modules (nvidia-open, 515 or newer), or load nvidia-peermem",
        )
        .told_by(source),
        Ok((_, source)) => Finding::ok(Link::DmaBufExport, "the GPU's driver exports dma-bufs").told_by(source),
    }
}

/// Whether its driver serves nvidia-peermem.
pub(in crate::doctor) fn gpu_direct(cuda: &Cuda, gpu: &Gpu) -> Finding {
    match Asked::new(cuda, gpu).attribute(Link::GpuDirect, 116) {
        Err(unknown) => unknown,
        Ok((0, source)) => Finding::broken(
            Link::GpuDirect,
            "the GPU does not support GPUDirect RDMA",
            "GPUDirect RDMA takes a data-centre or professional GPU, and no vGPU without it",
        )
        .told_by(source),
        Ok((_, source)) => Finding::ok(Link::GpuDirect, "the GPU supports GPUDirect RDMA").told_by(source),
    }
}
