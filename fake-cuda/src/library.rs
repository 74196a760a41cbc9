//! Finds and loads the stand-in.

use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use tempfile::TempDir;

const FILE: &str = "libfake_cuda.so";

/// The name of NVIDIA's management library, in a [`directory`].
pub const MANAGEMENT: &str = "libnvidia-ml.so.1";

/// The loaded stand-in. Its [knobs and counters](crate) are the process's.
#[derive(Debug, Clone, Copy)]
pub struct Fake {
    set: extern "C" fn(*const c_char, u64) -> u32,
    get: extern "C" fn(*const c_char) -> u64,
    fail: extern "C" fn(*const c_char, u64, u32) -> u32,
}

impl Fake {
    /// Turns a knob.
    ///
    /// # Panics
    ///
    /// If there is no such knob.
    pub fn set(&self, name: &str, value: u64) {
        assert_eq!((self.set)(c_string(name).as_ptr(), value), 0, "the stand-in has no knob {name}");
    }

    /// Reads a knob or a counter, or how often the driver function `name` was called.
    pub fn get(&self, name: &str) -> u64 {
        (self.get)(c_string(name).as_ptr())
    }

    /// Lets the `nth` next call of a driver function, 1 being the next one, fail with `code` and do nothing else.
    ///
    /// The names `copy`, `memset`, `kernel`, `record` and `wait` are what streams do: such an operation then fails
    /// when its turn comes, and its context with it. An `nth` of 0 takes the failure back.
    pub fn fail(&self, function: &str, nth: u64, code: u32) {
        assert_eq!((self.fail)(c_string(function).as_ptr(), nth, code), 0, "an error has a code");
    }
}

/// Loads the stand-in as this process's `libcuda.so.1`, the first time.
///
/// # Errors
///
/// If it is not built, or if a real `libcuda.so` is installed, which programs that look for that name would take
/// instead: start the process with [`directory`] in `LD_LIBRARY_PATH` then.
pub fn load() -> io::Result<Fake> {
    static LOADED: OnceLock<Fake> = OnceLock::new();
    if let Some(fake) = LOADED.get() {
        return Ok(*fake);
    }
    let fake = open(&path()?)?;
    // cudarc asks for this name before it asks for `libcuda.so.1`.
    if let Ok(other) = open_library(Path::new("libcuda.so")) {
        symbols(&other).map_err(|_| io::Error::other("a real libcuda.so is installed and would be used"))?;
    }
    Ok(*LOADED.get_or_init(|| fake))
}

/// The stand-in's file, which Cargo builds next to the tests that depend on this crate.
/// The variable `FAKE_CUDA_LIBRARY` names another: a copy, or one built without the sanitizer that the tests are built
/// with, whose functions a library cannot find in the program.
///
/// # Errors
///
/// If it is not there.
pub fn path() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os("FAKE_CUDA_LIBRARY") {
        return Ok(path.into());
    }
    // Tests are in `deps`, as the library is; examples in a directory beside it; programs one above.
    let program = std::env::current_exe()?;
    let nearby = program.ancestors().skip(1).take(2).flat_map(|dir| [dir.join(FILE), dir.join("deps").join(FILE)]);
    nearby
        .into_iter()
        .find(|file| file.is_file())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{FILE} is not near {}", program.display())))
}

/// A directory for `LD_LIBRARY_PATH`, in which the stand-in goes by the names of the driver and of the [`MANAGEMENT`] library. Dropping
/// removes it.
///
/// Of the functions in `without`, that driver knows nothing, like an older one.
///
/// # Errors
///
/// If the stand-in is not built or the directory cannot be made.
pub fn directory(without: &[&str]) -> io::Result<TempDir> {
    let directory = tempfile::Builder::new().prefix("fake-cuda-").tempdir()?;
    let library = directory.path().join("libcuda.so.1");
    if without.is_empty() {
        symlink(path()?, &library)?;
    } else {
        let mut image = fs::read(path()?)?;
        for function in without {
            rename(&mut image, function);
        }
        fs::write(&library, image)?;
    }
    symlink("libcuda.so.1", directory.path().join("libcuda.so"))?;
    symlink("libcuda.so.1", directory.path().join(MANAGEMENT))?;
    Ok(directory)
}

/// Spoils a name in the table of symbols, where names stand between zeros: nobody finds it any more.
fn rename(image: &mut [u8], function: &str) {
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let mut at = 0;
    while let Some(found) = image[at..].windows(name.len()).position(|window| window == name) {
        image[at + found + 1] = b'_';
        at += found + name.len() - 1;
    }
}

fn open(path: &Path) -> io::Result<Fake> {
    symbols(&open_library(path)?)
}

fn open_library(path: &Path) -> io::Result<Library> {
    // SAFETY: the library's initialization is that of Rust's standard library, or NVIDIA's, which programs load so.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(io::Error::other)
}

fn symbols(library: &Library) -> io::Result<Fake> {
    /// A function of the library, which is never unloaded.
    fn symbol<F: Copy>(library: &Library, name: &CStr) -> io::Result<F> {
        // SAFETY: only the stand-in has these names, and gives them the types below.
        unsafe { library.get::<F>(name.to_bytes_with_nul()) }.map(|found| *found).map_err(io::Error::other)
    }
    Ok(Fake {
        set: symbol(library, c"fake_cuda_set")?,
        get: symbol(library, c"fake_cuda_get")?,
        fail: symbol(library, c"fake_cuda_fail")?,
    })
}

fn c_string(name: &str) -> CString {
    CString::new(name).expect("a name has no zero inside")
}
