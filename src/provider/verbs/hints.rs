//! Errors of the verbs, with what helps: sizes, limits, and where the loader looked.

use std::io;

use super::sys::LoadError;
use crate::error::Error;

/// A verb that reports through `errno`.
pub(super) fn last(operation: &'static str, target: impl std::fmt::Display) -> Error {
    Error::io(operation, target, io::Error::last_os_error())
}

/// A verb that returns its error number: most do so as it is, some providers negated, some as -1 with `errno`.
pub(super) fn error_of(returned: i32) -> io::Error {
    match returned {
        -1 => io::Error::last_os_error(),
        code => io::Error::from_raw_os_error(code.saturating_abs()),
    }
}

/// `Ok` for 0.
pub(super) fn check(returned: i32, operation: &'static str, target: impl std::fmt::Display) -> Result<(), Error> {
    if returned == 0 { Ok(()) } else { Err(Error::io(operation, target, error_of(returned))) }
}

pub(super) fn not_loaded(operation: &'static str, error: &LoadError) -> Error {
    let source = io::Error::new(io::ErrorKind::NotFound, error.clone());
    Error::io(operation, "an RDMA device (Debian: packages libibverbs1, librdmacm1, ibverbs-providers)", source)
}

/// Registering needs pinned memory, of which a process may have only so much.
pub(super) fn registering(operation: &'static str, len: usize, error: io::Error) -> Error {
    let locked = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM));
    let target = if locked { format!("{len} bytes ({})", memlock()) } else { format!("{len} bytes") };
    Error::io(operation, target, error)
}

/// Creating a queue pins memory as well.
pub(super) fn creating(what: &str, error: io::Error) -> Error {
    let locked = error.raw_os_error() == Some(libc::ENOMEM);
    let target = if locked { format!("{what} ({})", memlock()) } else { what.to_owned() };
    Error::io("create", target, error)
}

fn memlock() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to the place given.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return "see the locked-memory limit, ulimit -l".to_owned();
    }
    let show = |value| if value == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{value} bytes") };
    format!(
        "locked-memory limit: soft {}, hard {}; raise it with ulimit -l, LimitMEMLOCK= or CAP_IPC_LOCK",
        show(limit.rlim_cur),
        show(limit.rlim_max)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_names_size_and_limits() {
        let text = registering("register", 1 << 20, io::Error::from_raw_os_error(libc::ENOMEM)).to_string();
        for part in ["1048576 bytes", "soft", "hard", "ulimit -l"] {
            assert!(text.contains(part), "{text}");
        }
        let text = registering("register", 1 << 20, io::Error::from_raw_os_error(libc::EFAULT)).to_string();
        assert!(!text.contains("ulimit"), "{text}");
    }

    #[test]
    fn every_way_to_return_an_error_number_is_understood() {
        assert_eq!(error_of(libc::ENOMEM).raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(error_of(-libc::ENOMEM).raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(error_of(i32::MIN).raw_os_error(), Some(i32::MAX));
    }
}
