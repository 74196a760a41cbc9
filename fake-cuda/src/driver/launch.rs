//! Modules, functions and launches. Any image is taken for the one that has the [`kernels`](super::kernels).

use std::ffi::{CStr, c_char};
use std::path::Path;

use super::kernels::Kernel;
use super::registry::Registry;
use super::{Code, In, Out, Result, context, driver, hooks, stream};

struct Module {
    handle: usize,
    context: usize,
}

struct Function {
    handle: usize,
    module: usize,
    kernel: Kernel,
}

static MODULES: Registry<Module> = Registry::new("module", 0x3000_0000);
static FUNCTIONS: Registry<Function> = Registry::new("function", 0x4000_0000);

/// The most threads of a block.
const BLOCK: u64 = 1024;

pub(super) fn live() -> u64 {
    MODULES.count()
}

/// Forgets a context's modules, and says how many the program had left.
pub(super) fn purge(context: usize) -> u64 {
    FUNCTIONS.purge(|function| MODULES.find(function.module).is_none_or(|module| module.context == context));
    MODULES.purge(|module| module.context == context)
}

fn load(module: Out<usize>) -> Result {
    let context = context::usable()?.handle;
    module.put(MODULES.insert(|handle| Module { handle, context }).handle)
}

fn load_image(module: Out<usize>, image: In<u8>) -> Result {
    // At least it is there, and says something.
    if image.get(0)? == 0 {
        return Err(Code::INVALID_IMAGE);
    }
    load(module)
}

fn text<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so by the driver API's contract a string that outlives the call.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code::INVALID_VALUE)
}

driver! {
    fn cuModuleLoadData(module: Out<usize>, image: In<u8>) {
        load_image(module, image)
    }

    fn cuModuleLoadDataEx(module: Out<usize>, image: In<u8>, _count: u32, _options: usize, _values: usize) {
        load_image(module, image)
    }

    fn cuModuleLoad(module: Out<usize>, file: *const c_char) {
        if !Path::new(text(file)?).is_file() {
            return Err(Code::FILE_NOT_FOUND);
        }
        load(module)
    }

    fn cuModuleUnload(module: usize) {
        let module = MODULES.remove(module)?;
        FUNCTIONS.purge(|function| function.module == module.handle);
        context::find(module.context)?.check()
    }

    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: *const c_char) {
        let module = MODULES.get(module)?.handle;
        let kernel = Kernel::of_name(text(name)?).ok_or(Code::NOT_FOUND)?;
        function.put(FUNCTIONS.insert(|handle| Function { handle, module, kernel }).handle)
    }

    fn cuModuleGetGlobal_v2(_address: usize, _len: usize, module: usize, _name: usize) {
        MODULES.get(module)?;
        Err(Code::NOT_FOUND)
    }

    fn cuFuncGetAttribute(value: Out<i32>, number: u32, function: usize) {
        FUNCTIONS.get(function)?;
        // MAX_THREADS_PER_BLOCK, and NUM_REGS.
        value.put(match number { 0 => BLOCK as i32, 4 => 32, _ => 0 })
    }

    fn cuFuncSetAttribute(function: usize, _number: u32, _value: i32) {
        FUNCTIONS.get(function).map(|_| ())
    }

    fn cuFuncSetCacheConfig(function: usize, _config: u32) {
        FUNCTIONS.get(function).map(|_| ())
    }

    fn cuLaunchKernel(
        function: usize,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        _shared: u32,
        stream: usize,
        arguments: In<In<u64>>,
        _extra: usize,
    ) {
        let kernel = FUNCTIONS.get(function)?.kernel;
        let stream = stream::get(stream)?;
        let threads = u64::from(block_x) * u64::from(block_y) * u64::from(block_z);
        if threads == 0 || threads > BLOCK || [grid_x, grid_y, grid_z].contains(&0) {
            return Err(Code::INVALID_VALUE);
        }
        let launch = kernel.prepare(|index| arguments.get(index)?.get(0))?;
        stream.submit("kernel", move || {
            hooks::delay("kernel_delay_us");
            launch.run()?;
            hooks::count("launches", 1);
            Ok(())
        });
        Ok(())
    }
}
