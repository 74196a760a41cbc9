//! What tests set and read: knobs, counters and failures to come.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use super::{Code, Result, context, device, event, launch, lock, memory, pointer, stream};

/// Knobs, and what they are if neither a variable nor a test says otherwise.
const DEFAULTS: &[(&str, u64)] = &[
    ("devices", 2),
    ("memory", 8 << 30),
    ("driver_version", 13_000),
    ("compute_capability", 90),
    ("host_visible", 0),
    ("event_polls", 0),
    ("copy_delay_us", 0),
    ("kernel_delay_us", 0),
    ("writes_ordering", 100),
    ("flush_options", 1),
    ("c2c", 0),
    ("dmabuf", 1),
    ("gdr", 1),
    ("memory_pools", 1),
    ("nvlink_kind", 2),
    ("nvlink_state", 1),
    ("nvlink_status", 0),
    ("nvml_status", 0),
];

static KNOBS: LazyLock<BTreeMap<&str, AtomicU64>> = LazyLock::new(|| {
    DEFAULTS.iter().map(|&(name, default)| (name, AtomicU64::new(from_environment(name).unwrap_or(default)))).collect()
});

/// How often each function was called, and what else is counted.
static COUNTS: LazyLock<Mutex<HashMap<&str, u64>>> = LazyLock::new(Mutex::default);

/// By function: which call fails, counted from the next one, and how.
static FAILURES: LazyLock<Mutex<HashMap<String, (u64, Code)>>> = LazyLock::new(Mutex::default);

fn from_environment(name: &str) -> Option<u64> {
    let variable = format!("FAKE_CUDA_{}", name.to_uppercase());
    let value = std::env::var(&variable).ok()?;
    match value.parse() {
        Ok(value) => Some(value),
        Err(_) => super::misuse(format_args!("{variable} is no number: {value}")),
    }
}

/// What a knob is set to.
pub(super) fn knob(name: &str) -> u64 {
    KNOBS[name].load(SeqCst)
}

/// A knob that is an `int` of the driver API.
pub(super) fn small_knob(name: &str) -> i32 {
    i32::try_from(knob(name)).unwrap_or(i32::MAX)
}

/// Waits as long as a knob says.
pub(super) fn delay(name: &str) {
    let time = knob(name);
    if time > 0 {
        std::thread::sleep(Duration::from_micros(time));
    }
}

/// Counts something.
pub(super) fn count(name: &'static str, more: u64) {
    *lock(&COUNTS).entry(name).or_default() += more;
}

/// Counts a call, and says whether it is one that is to fail.
pub(super) fn enter(function: &'static str) -> Result {
    count(function, 1);
    let mut failures = lock(&FAILURES);
    let Some((left, code)) = failures.get_mut(function) else { return Ok(()) };
    *left -= 1;
    if *left > 0 {
        return Ok(());
    }
    let code = *code;
    failures.remove(function);
    Err(code)
}

fn reset() {
    for &(name, default) in DEFAULTS {
        KNOBS[name].store(from_environment(name).unwrap_or(default), SeqCst);
    }
    lock(&COUNTS).clear();
    lock(&FAILURES).clear();
}

fn read(name: &str) -> u64 {
    if let Some(knob) = KNOBS.get(name) {
        return knob.load(SeqCst);
    }
    match name {
        "live_allocations" => memory::device_usage().0,
        "live_bytes" => memory::device_usage().1,
        "live_host_allocations" => memory::host_usage(),
        "live_events" => event::live(),
        "live_streams" => stream::live(),
        "live_modules" => launch::live(),
        "live_contexts" => context::live(),
        "open_handles" => pointer::open_handles(),
        _ => lock(&COUNTS).get(name).copied().unwrap_or(0),
    }
}

/// A name that a test gave.
fn text<'a>(name: *const c_char) -> Result<&'a str> {
    if name.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so by the contract of the exported functions a string that outlives the call.
    unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::INVALID_VALUE)
}

/// Sets a knob. Returns 0, or 1 if there is none of this name.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set(name: *const c_char, value: u64) -> u32 {
    match text(name) {
        Ok("reset") => reset(),
        Ok(name) if KNOBS.contains_key(name) => KNOBS[name].store(value, SeqCst),
        _ => return Code::INVALID_VALUE.0,
    }
    device::apply_visibility();
    0
}

/// Reads a knob or a counter. A counter that nothing has counted yet is 0.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_get(name: *const c_char) -> u64 {
    text(name).map_or(0, read)
}

/// Lets the `nth` next call of a function fail with `code`; with 0, none. Returns 0, or 1 for a code of 0.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_fail(function: *const c_char, nth: u64, code: u32) -> u32 {
    let Ok(function) = text(function) else { return Code::INVALID_VALUE.0 };
    if nth == 0 {
        lock(&FAILURES).remove(function);
    } else if code == 0 {
        return Code::INVALID_VALUE.0;
    } else {
        lock(&FAILURES).insert(function.to_owned(), (nth, Code(code)));
    }
    0
}
