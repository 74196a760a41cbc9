//! What the tests of the stand-in share.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;
use fake_cuda::Fake;

/// The process's driver, for one test at a time: its knobs and counters are the process's.
pub struct Driver {
    fake: Option<Fake>,
    _alone: MutexGuard<'static, ()>,
}

impl Driver {
    /// The stand-in; with `FAKE_CUDA=off`, the machine's own driver.
    pub fn any() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let real = std::env::var_os("FAKE_CUDA").is_some_and(|value| value == "off");
        let fake = (!real).then(|| fake_cuda::load().expect("the stand-in is built with its tests"));
        if let Some(fake) = fake {
            fake.set("reset", 0);
        }
        Self { fake, _alone: alone }
    }

    /// The stand-in, whatever the machine has.
    pub fn stand_in() -> (Self, Fake) {
        let driver = Self::any();
        let fake = driver.fake.expect("this test is of the stand-in alone");
        (driver, fake)
    }

    /// Whether nothing of the program is left in the stand-in.
    pub fn is_clean(&self) -> bool {
        let counters = ["live_allocations", "live_bytes", "live_host_allocations", "live_events", "live_streams"];
        let more = ["live_modules", "live_contexts", "open_handles", "leaked"];
        let Some(fake) = self.fake else { return true };
        counters.iter().chain(&more).all(|counter| fake.get(counter) == 0)
    }
}

/// The tests' kernels.
pub struct Kernels(Arc<CudaModule>);

impl Kernels {
    pub fn load(context: &Arc<CudaContext>) -> Self {
        let image = Ptx::from_src(include_str!("../../../tests/gpu/kernels.ptx"));
        Self(context.load_module(image).expect("the kernels are for any device"))
    }

    pub fn get(&self, name: &str) -> CudaFunction {
        self.0.load_function(name).expect("there is such a kernel")
    }
}

/// What `fill` is to write.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let byte = |i: u64| (i.wrapping_add(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
    (0..len as u64).map(byte).collect()
}

/// With which a process ends that did what it was to do: none that ran another test, or no test.
const SURVIVED: i32 = 42;

/// How a process ended that does `fatal`, which this one shall survive: `test` itself, which calls this, once more.
pub fn end_of(test: &str, variables: &[(&str, &str)], fatal: impl FnOnce()) -> End {
    const CHILD: &str = "FAKE_CUDA_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        fatal();
        std::process::exit(SURVIVED);
    }
    let mut command = Command::new(std::env::current_exe().expect("tests are a file"));
    command.args([test, "--exact", "--nocapture"]).env(CHILD, "1").envs(variables.iter().copied());
    End(command.output().expect("tests can be started"))
}

/// The end of a process.
pub struct End(Output);

impl End {
    pub fn signal(&self) -> Option<i32> {
        self.0.status.signal()
    }

    /// Whether it did all of it.
    pub fn survived(&self) -> bool {
        self.0.status.code() == Some(SURVIVED)
    }

    pub fn said(&self, text: &str) -> bool {
        self.errors().contains(text)
    }

    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }
}
