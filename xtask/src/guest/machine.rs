//! The virtual machine.

use std::fs;

use anyhow::{Result, bail};
use cargo_metadata::camino::Utf8Path;

use super::image::Image;
use crate::command::Command;

/// What time passes by in the guest.
#[derive(Clone, Copy, PartialEq)]
pub enum Clock {
    /// The host's, on two CPUs.
    Host,
    /// The guest's own instructions, one a nanosecond, on one CPU: what runs twice takes the same time twice, however busy
    /// the host is. A guest that sleeps skips the time.
    Instructions,
}

impl Clock {
    fn machine(self) -> &'static str {
        match self {
            Self::Host => "-accel tcg,thread=multi -cpu max -smp 2",
            // Nothing that differs from boot to boot: no wall clock, no hardware random numbers.
            Self::Instructions => {
                "-accel tcg,thread=single -icount shift=0,sleep=off -rtc clock=vm,base=2026-01-01 -seed 1 \
                 -cpu max,-rdrand,-rdseed -smp 1 -nodefaults"
            }
        }
    }

    fn kernel_line(self) -> &'static str {
        match self {
            Self::Host => "console=ttyS0 quiet panic=-1",
            Self::Instructions => "console=ttyS0 quiet panic=-1 nokaslr norandmaps",
        }
    }
}

/// Boots the guest, and gives what it printed.
pub fn boot(image: &Image, console: &Utf8Path, clock: Clock, timeout: u32) -> Result<String> {
    boot_as(image, console, clock.machine(), clock.kernel_line(), timeout)
}

/// As [`boot`], with a machine and a kernel line of the caller's. TCG, not KVM: that is not there on every machine, and enough for this.
pub fn boot_as(image: &Image, console: &Utf8Path, machine: &str, line: &str, timeout: u32) -> Result<String> {
    println!("guest: booting; its console is {console}");
    let qemu = Command::new("timeout --kill-after=5")
        .arg(timeout.to_string())
        .args("qemu-system-x86_64 -m 2048 -no-reboot -nic none -display none -monitor none")
        .args(machine)
        .arg("-serial")
        .arg(format!("file:{console}"))
        .arg("-append")
        .arg(line)
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initramfs)
        .finish()?;
    // A console may hold anything.
    let text = String::from_utf8_lossy(&fs::read(console)?).into_owned();
    if !text.contains("guest: up") {
        bail!("the guest did not boot:\n{text}\n{}", qemu.text);
    }
    Ok(text)
}
