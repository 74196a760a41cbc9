//! How the stand-in is found.

use std::path::Path;

use cudarc::driver::CudaContext;
use libloading::os::unix::Library;

use super::common::end_of;

fn has(directory: &Path, function: &str) -> bool {
    // SAFETY: the library's initialization is that of Rust's standard library.
    let library = unsafe { Library::new(directory.join("libcuda.so.1")) }.unwrap();
    // SAFETY: the symbol is only looked for.
    unsafe { library.get::<*const ()>(function.as_bytes()) }.is_ok()
}

#[test]
fn a_driver_can_lack_a_function() {
    // Not in this process, where it might then be taken for the driver.
    let end = end_of("library::a_driver_can_lack_a_function", &[], || {
        let (lacks, has_still) = ("cuMemGetHandleForAddressRange", "cuMemGetAddressRange_v2");
        let whole = fake_cuda::directory(&[]).unwrap();
        assert!(has(whole.path(), lacks) && has(whole.path(), has_still));
        let older = fake_cuda::directory(&[lacks]).unwrap();
        assert!(!has(older.path(), lacks));
        assert!(has(older.path(), has_still));
    });
    assert!(end.survived(), "{}", end.errors());
}

#[test]
fn a_program_finds_it_where_the_variable_says() {
    let directory = fake_cuda::directory(&[]).unwrap();
    let path = directory.path().to_str().unwrap();
    let variables = [("LD_LIBRARY_PATH", path), ("FAKE_CUDA_DEVICES", "5")];
    let end = end_of("library::a_program_finds_it_where_the_variable_says", &variables, || {
        assert_eq!(CudaContext::device_count().unwrap(), 5);
    });
    assert!(end.survived(), "{}", end.errors());
}

#[test]
fn once_loaded_it_is_the_driver() {
    fake_cuda::load().unwrap();
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    let context = CudaContext::new(1).unwrap();
    assert!(context.name().unwrap().starts_with("Fake CUDA device"));
}
