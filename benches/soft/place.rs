//! Where a process runs, and for how long: on one CPU, and not after its driver.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;

#[derive(Clone, Copy, clap::Args)]
pub struct Place {
    /// The CPU to run on.
    #[arg(long)]
    pub cpu: Option<usize>,
    /// The driver: when it ends, this process does.
    #[arg(long)]
    pub driver: Option<i32>,
}

impl Place {
    /// For the whole process: called before it starts any thread, and inherited by what it becomes.
    pub fn take(&self) -> Result<()> {
        if let Some(driver) = self.driver {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have ended just before.
            ensure!(rustix::process::getppid() == Pid::from_raw(driver), "the driver is gone");
        }
        if let Some(cpu) = self.cpu {
            let mut set = CpuSet::new();
            set.set(cpu);
            rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("pin to CPU {cpu}"))?;
        }
        Ok(())
    }

    /// As arguments of a child of this process.
    pub fn on(cpu: usize) -> [String; 2] {
        [format!("--cpu={cpu}"), format!("--driver={}", std::process::id())]
    }
}

/// The CPUs that this process may use.
pub fn cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

pub fn become_program(command: &[OsString]) -> Result<()> {
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    Err(error).with_context(|| format!("run {}", Path::new(&command[0]).display()))
}
