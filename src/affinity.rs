//! Where threads run.

/// From now on the calling thread runs on these CPUs only, if it may.
pub(crate) fn pin_this_thread(cpus: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < rustix::thread::CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(?cpus, %error, "cannot pin a thread");
    }
}
