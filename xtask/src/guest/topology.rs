//! The topology of a PCIe tree, as the kernel of a machine with one shows it.

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use cargo_metadata::camino::Utf8Path;

use super::image::{self, Image};
use super::test::{self, Outcome};
use super::{machine, name_of, prepare};
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub struct Args {
    /// Seconds that each guest may run.
    #[arg(long, default_value_t = 120)]
    timeout: u32,
}

/// What the tests `live` in `tests/topology` know, by the numbers of slots. A display card stands for a GPU.
///
/// ```text
/// pcie.0 (no node)  ┬ root port, switch ┬ 2 NIC 1
///                   │                   ├ 3 GPU
///                   │                   └ 4 switch ─ 5 NIC 2
///                   └ 6 GPU and NIC 5, functions of one device
/// pxb1 (node 1)     ─ 7 NIC 3
/// pxb2 (node 0)     ─ 8 GPU
/// pxb3 (node 0)     ─ 9 NIC 4
/// ```
///
/// The NICs have no control queue: the kernel's driver waits for its answers without end, also while the machine is switched off.
const MACHINE: &str = "-machine q35,kernel-irqchip=off -accel tcg,thread=multi -cpu max -smp 2 \
    -object memory-backend-ram,id=m0,size=1024M -object memory-backend-ram,id=m1,size=1024M \
    -numa node,nodeid=0,memdev=m0,cpus=0 -numa node,nodeid=1,memdev=m1,cpus=1 \
    -global ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off \
    -global virtio-net-pci.disable-legacy=on -global virtio-net-pci.romfile= \
    -global virtio-net-pci.ctrl_vq=off -global virtio-net-pci.ctrl_rx=off -global virtio-net-pci.ctrl_vlan=off \
    -global virtio-net-pci.ctrl_mac_addr=off -global virtio-net-pci.ctrl_guest_offloads=off \
    -global virtio-net-pci.guest_announce=off \
    -device pcie-root-port,id=rp0,bus=pcie.0,chassis=1,slot=1 -device x3130-upstream,id=sw0,bus=rp0 \
    -device xio3130-downstream,id=d0,bus=sw0,chassis=2,slot=2 \
    -device xio3130-downstream,id=d1,bus=sw0,chassis=3,slot=3 \
    -device xio3130-downstream,id=d2,bus=sw0,chassis=4,slot=4 -device x3130-upstream,id=sw1,bus=d2 \
    -device xio3130-downstream,id=e0,bus=sw1,chassis=5,slot=5 \
    -device pcie-root-port,id=rp1,bus=pcie.0,chassis=6,slot=6 \
    -device pxb-pcie,id=pxb1,bus=pcie.0,bus_nr=0x80,numa_node=1 \
    -device pcie-root-port,id=rp2,bus=pxb1,chassis=7,slot=7 \
    -device pxb-pcie,id=pxb2,bus=pcie.0,bus_nr=0x40,numa_node=0 \
    -device pcie-root-port,id=rp3,bus=pxb2,chassis=8,slot=8 \
    -device pxb-pcie,id=pxb3,bus=pcie.0,bus_nr=0xc0,numa_node=0 \
    -device pcie-root-port,id=rp4,bus=pxb3,chassis=9,slot=9 \
    -netdev user,id=n0 -device virtio-net-pci,netdev=n0,bus=d0 \
    -netdev user,id=n1 -device virtio-net-pci,netdev=n1,bus=e0 \
    -netdev user,id=n2 -device virtio-net-pci,netdev=n2,bus=rp2 \
    -netdev user,id=n3 -device virtio-net-pci,netdev=n3,bus=rp4 \
    -vga none -device bochs-display,bus=d1 -device bochs-display,bus=rp1,addr=00.0,multifunction=on \
    -netdev user,id=n4 -device virtio-net-pci,netdev=n4,bus=rp1,addr=00.1 \
    -device bochs-display,bus=rp3";

/// What the kernel is told of the IOMMU, whether there is one, and what its groups' type then is.
const BOOTS: [(&str, &str, &str, &str); 3] = [
    ("none", "", "", "none"),
    ("on", "-device intel-iommu", "intel_iommu=on", "DMA-FQ"),
    ("pt", "-device intel-iommu", "intel_iommu=on iommu=pt", "identity"),
];

/// Soft-RoCE on each of the NICs.
const JOB: &str = "for module in $(cat /modules/drivers); do insmod /modules/$module; done
n=10
for interface in /sys/class/net/*; do
  [ -e $interface/device ] || continue
  name=${interface##*/}
  n=$((n + 1))
  /sbin/ip addr add 10.2.$n.1/24 dev $name
  /sbin/ip link set $name up
  rdma link add rxe_$name type rxe netdev $name
done
";

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let outcome = in_guests(workspace, args.timeout)?;
    println!("{}", outcome.console);
    println!("guests: {} s", outcome.seconds);
    println!("{} passed, {} failed", outcome.passed, outcome.failed);
    Ok(if outcome.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// For `cargo xtask test`. A failure is an error with what the guests printed.
pub fn check(workspace: &Workspace) -> Result<Outcome> {
    let outcome = in_guests(workspace, 120)?;
    if outcome.failed > 0 {
        bail!("{}\n{} passed, {} failed", outcome.console, outcome.passed, outcome.failed);
    }
    Ok(outcome)
}

/// One boot for each setting of the IOMMU, at the same time: most of a boot is waiting for another CPU than its first.
fn in_guests(workspace: &Workspace, timeout: u32) -> Result<Outcome> {
    let dir = prepare(workspace)?;
    let programs = test::build("test --no-run", "--test topology")?;
    let program = programs.iter().find(|file| file.file_stem().is_some_and(|stem| stem.starts_with("topology")));
    let program = program.context("cargo built no test named topology")?.clone();
    let job = format!("{JOB}/programs/{} live --ignored --test-threads=1\n", name_of(&program)?);
    let image = image::build(&dir, &[program], &[], &job)?;
    let start = Instant::now();
    let mut all = Outcome { passed: 0, failed: 0, skips: Vec::new(), console: String::new(), seconds: 0 };
    for outcome in boots(&image, &dir, timeout) {
        let outcome = outcome?;
        all.passed += outcome.passed;
        all.failed += outcome.failed;
        all.skips.extend(outcome.skips);
        all.console += &outcome.console;
    }
    all.seconds = start.elapsed().as_secs();
    Ok(all)
}

fn boots(image: &Image, dir: &Utf8Path, timeout: u32) -> Vec<Result<Outcome>> {
    let boot = |(name, device, line, kind): (&str, &str, &str, &str)| {
        let console = dir.join(format!("console-iommu-{name}.log"));
        // What init does not know is in the environment of what it runs.
        let line = format!("console=ttyS0 quiet panic=-1 {line} TOKIO_RDMA_TEST_IOMMU={kind}");
        test::summary(machine::boot_as(image, &console, &format!("{MACHINE} {device}"), &line, timeout)?, 1)
    };
    thread::scope(|scope| {
        let boots = BOOTS.map(|settings| scope.spawn(move || boot(settings)));
        boots.into_iter().map(|boot| boot.join().unwrap_or_else(|_| Err(anyhow!("a boot panicked")))).collect()
    })
}
