//! The bindings against a C compiler and the installed headers, and the loader against libraries that are not right.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::layout::LAYOUTS;
use super::*;

const HEADERS: &str =
    "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n";

/// Whether C programs can be compiled against the headers here; says so when not.
fn headers(test: &str) -> bool {
    let found = Path::new("/usr/include/infiniband/verbs.h").exists()
        && Path::new("/usr/include/rdma/rdma_cma.h").exists()
        && Command::new("cc").arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED {test}: needs cc and the headers of libibverbs-dev and librdmacm-dev");
    }
    found
}

/// Compiles C into a file of its own directory, which goes away with the value.
struct Compiled {
    dir: PathBuf,
    file: PathBuf,
}

impl Compiled {
    fn new(name: &str, source: &str, flags: &[&str]) -> Self {
        let dir = std::env::temp_dir().join(format!("tokio-rdma-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (source_file, file) = (dir.join("it.c"), dir.join("it"));
        std::fs::write(&source_file, source).unwrap();
        let output = Command::new("cc").args(flags).arg("-o").arg(&file).arg(&source_file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { dir, file }
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn layouts_are_those_of_the_c_compiler() {
    if !headers("layouts_are_those_of_the_c_compiler") {
        return;
    }
    // bindgen made up the names of what is anonymous in C; those are covered by the offsets around them.
    let named = || LAYOUTS.iter().filter(|layout| !layout.name.contains("__bindgen"));
    let mut source = format!("{HEADERS}int main(void) {{\n");
    for layout in named() {
        let kind = if layout.name == "ibv_gid" { "union" } else { "struct" };
        let name = format!("{kind} {}", layout.name);
        source += &format!("printf(\"{} %zu %zu\\n\", sizeof({name}), _Alignof({name}));\n", layout.name);
        for (field, _) in fields(layout) {
            // The one field whose name is a keyword of Rust.
            let c_field = field.trim_end_matches('_');
            source += &format!("printf(\"{}.{field} %zu\\n\", offsetof({name}, {c_field}));\n", layout.name);
        }
    }
    source += "}\n";
    let program = Compiled::new("layout", &source, &[]);
    let theirs = Command::new(&program.file).output().unwrap();
    let mut ours = String::new();
    for layout in named() {
        ours += &format!("{} {} {}\n", layout.name, layout.size, layout.align);
        for (field, offset) in fields(layout) {
            ours += &format!("{}.{field} {offset}\n", layout.name);
        }
    }
    assert!(ours.lines().count() > 250, "{} lines are too few to have compared everything", ours.lines().count());
    assert_eq!(ours, String::from_utf8(theirs.stdout).unwrap());
}

fn fields(layout: &assert_layout::Layout) -> impl Iterator<Item = &'static (&'static str, usize)> {
    layout.fields.iter().filter(|(field, _)| !field.contains("bindgen"))
}

#[test]
fn constants_are_those_of_the_c_compiler() {
    if !headers("constants_are_those_of_the_c_compiler") {
        return;
    }
    // All of them, read from the file that the generator wrote.
    let constants: Vec<(&str, &str)> = include_str!("constants.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("pub const ")?.strip_suffix(';')?.split_once(": "))
        .map(|(name, rest)| (name, rest.rsplit(" = ").next().unwrap()))
        .collect();
    assert!(constants.len() > 150, "{} constants are too few", constants.len());
    let mut source = format!("{HEADERS}int main(void) {{\n");
    for (name, _) in &constants {
        source += &format!("printf(\"{name} %lld\\n\", (long long){name});\n");
    }
    source += "}\n";
    let program = Compiled::new("constants", &source, &[]);
    let theirs = Command::new(&program.file).output().unwrap();
    let ours: String = constants.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    assert_eq!(ours, String::from_utf8(theirs.stdout).unwrap());
}

/// What the fake provider below was last called with: a sum in which every argument has a place of its own.
static SEEN: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    SEEN.store(cq as usize ^ (entries as usize) << 40 ^ (wc as usize).rotate_left(20), Ordering::Relaxed);
    entries + 1
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited: c_int) -> c_int {
    SEEN.store(cq as usize ^ (solicited as usize) << 40, Ordering::Relaxed);
    solicited + 2
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    SEEN.store(qp as usize ^ (wr as usize).rotate_left(20) ^ (bad as usize).rotate_left(40), Ordering::Relaxed);
    3
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    SEEN.store(qp as usize ^ (wr as usize).rotate_left(20) ^ (bad as usize).rotate_left(40), Ordering::Relaxed);
    4
}

unsafe extern "C" fn post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    SEEN.store(srq as usize ^ (wr as usize).rotate_left(20) ^ (bad as usize).rotate_left(40), Ordering::Relaxed);
    5
}

#[test]
fn inlines_do_what_the_headers_do() {
    if !headers("inlines_do_what_the_headers_do") {
        return;
    }
    const SOURCE: &str = "
        int c_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) { return ibv_poll_cq(cq, n, wc); }
        int c_req_notify_cq(struct ibv_cq *cq, int s) { return ibv_req_notify_cq(cq, s); }
        int c_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) { return ibv_post_send(qp, wr, bad); }
        int c_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) { return ibv_post_recv(qp, wr, bad); }
        int c_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) { return ibv_post_srq_recv(srq, wr, bad); }";
    let compiled = Compiled::new("inline", &format!("{HEADERS}{SOURCE}"), &["-shared", "-fPIC"]);
    // SAFETY: the library was just made, and has no initialisers.
    let library = unsafe { libloading::Library::new(&compiled.file) }.unwrap();

    // SAFETY: all fields are integers, pointers, optional functions, or glibc's plain pthread types: zero is a value of each.
    let (mut context, mut cq, mut qp): (ibv_context, ibv_cq, ibv_qp) = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut srq: ibv_srq = unsafe { std::mem::zeroed() };
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(req_notify_cq);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.ops.post_srq_recv = Some(post_srq_recv);
    cq.context = &raw mut context;
    qp.context = &raw mut context;
    srq.context = &raw mut context;
    let (cq, qp, srq) = (&raw mut cq, &raw mut qp, &raw mut srq);
    // The fake provider does not look behind these.
    let place = |n: usize| ptr::without_provenance_mut::<c_void>(n);

    /// Both sides' return value, and what the provider saw.
    fn both(ours: impl FnOnce() -> c_int, theirs: impl FnOnce() -> c_int) -> c_int {
        SEEN.store(0, Ordering::Relaxed);
        let a = (ours(), SEEN.swap(0, Ordering::Relaxed));
        let b = (theirs(), SEEN.swap(0, Ordering::Relaxed));
        assert_eq!(a, b);
        assert_ne!(a.1, 0, "the provider was not called");
        a.0
    }
    type Poll = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
    type Notify = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
    type Send = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
    type Receive = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    type ReceiveShared = unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    // SAFETY: the signatures are those of the source above, and the objects are as far filled in as the fakes look.
    unsafe {
        let c: libloading::Symbol<'_, Poll> = library.get(b"c_poll_cq\0").unwrap();
        let wc = place(0x1230).cast();
        assert_eq!(both(|| ibv_poll_cq(cq, 7, wc), || c(cq, 7, wc)), 8);

        let c: libloading::Symbol<'_, Notify> = library.get(b"c_req_notify_cq\0").unwrap();
        assert_eq!(both(|| ibv_req_notify_cq(cq, 1), || c(cq, 1)), 3);

        let c: libloading::Symbol<'_, Send> = library.get(b"c_post_send\0").unwrap();
        let (wr, bad) = (place(0x4560).cast(), place(0x7890).cast());
        assert_eq!(both(|| ibv_post_send(qp, wr, bad), || c(qp, wr, bad)), 3);

        let c: libloading::Symbol<'_, Receive> = library.get(b"c_post_recv\0").unwrap();
        let (wr, bad) = (place(0x4560).cast(), place(0x7890).cast());
        assert_eq!(both(|| ibv_post_recv(qp, wr, bad), || c(qp, wr, bad)), 4);

        let c: libloading::Symbol<'_, ReceiveShared> = library.get(b"c_post_srq_recv\0").unwrap();
        let (wr, bad) = (place(0x4560).cast(), place(0x7890).cast());
        assert_eq!(both(|| ibv_post_srq_recv(srq, wr, bad), || c(srq, wr, bad)), 5);
    }
}

#[test]
fn an_operation_that_the_provider_lacks_is_an_error() {
    // SAFETY: as in the test above.
    let (mut context, mut cq, mut qp): (ibv_context, ibv_cq, ibv_qp) = unsafe { std::mem::zeroed() };
    cq.context = &raw mut context;
    qp.context = &raw mut context;
    // SAFETY: nothing is called, and `bad` is a place of ours.
    unsafe {
        assert!(ibv_poll_cq(&raw mut cq, 1, ptr::null_mut()) < 0);
        assert_eq!(ibv_req_notify_cq(&raw mut cq, 0), libc::EOPNOTSUPP);
        let (wr, mut bad) = (ptr::without_provenance_mut(8), ptr::null_mut());
        assert_eq!(ibv_post_send(&raw mut qp, wr, &raw mut bad), libc::EOPNOTSUPP);
        assert_eq!(bad, wr, "none of the list was taken");
        let (wr, mut bad) = (ptr::without_provenance_mut(8), ptr::null_mut());
        let mut srq: ibv_srq = std::mem::zeroed();
        srq.context = &raw mut context;
        assert_eq!(ibv_post_srq_recv(&raw mut srq, wr, &raw mut bad), libc::EOPNOTSUPP);
        assert_eq!(bad, wr);
    }
}

#[test]
fn a_library_that_is_missing_or_damaged_is_an_error_that_names_it() {
    let missing = Verbs::load("libno-such-verbs.so.1").expect_err("there is no such library");
    assert_eq!((missing.library.as_str(), missing.symbol), ("libno-such-verbs.so.1", None));
    assert!(missing.to_string().contains("libno-such-verbs.so.1"), "{missing}");

    let damaged = std::env::temp_dir().join(format!("tokio-rdma-{}-damaged.so", std::process::id()));
    std::fs::write(&damaged, "\x7fELF").unwrap();
    let error = Verbs::load(damaged.to_str().unwrap()).expect_err("four bytes are no library");
    std::fs::remove_file(&damaged).unwrap();
    assert_eq!(error.symbol, None);
    assert!(error.text.contains("too short"), "{error}");
}

#[test]
fn a_symbol_that_is_missing_is_an_error_that_names_it() {
    let error = Cm::load("libc.so.6").expect_err("the C library knows nothing of RDMA");
    assert_eq!(error.symbol, Some("rdma_create_event_channel"));
    assert!(error.to_string().contains("libc.so.6 has no symbol rdma_create_event_channel"), "{error}");
}

#[test]
fn the_installed_libraries_have_every_required_symbol() {
    for (result, name) in [(Verbs::get().err(), "libibverbs"), (Cm::get().err(), "librdmacm")] {
        match result {
            None => {}
            Some(error) if error.symbol.is_none() => {
                eprintln!("SKIPPED the_installed_libraries_have_every_required_symbol: no {name} here: {error}");
            }
            Some(error) => panic!("{error}"),
        }
    }
}
