//! The driver: what each function of it does, and what they share.

mod allocate;
mod context;
mod copy;
mod device;
mod error;
mod event;
mod export;
mod hooks;
mod ipc;
mod kernels;
mod launch;
mod memory;
mod nvml;
mod pointer;
mod registry;
mod stream;
mod training;
mod value;
mod virtual_memory;
mod window;

use std::sync::{Mutex, MutexGuard, PoisonError};

use error::{Code, Result};
use export::{In, Out, driver};

/// Ends the process: the program has made a mistake that a real driver may not notice.
fn misuse(what: std::fmt::Arguments<'_>) -> ! {
    eprintln!("fake CUDA driver: {what}");
    std::process::abort()
}

/// No code panics with a lock held, other than by ending the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
