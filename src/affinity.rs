//! Where threads run.

use std::io;

/// From now on the calling thread runs on these CPUs only.
pub(crate) fn pin(cpus: &[usize]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < rustix::thread::CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// As [`pin`], if it may: for threads that work anywhere.
pub(crate) fn pin_this_thread(cpus: &[usize]) {
    if let Err(error) = pin(cpus) {
        tracing::warn!(?cpus, %error, "cannot pin a thread");
    }
}
