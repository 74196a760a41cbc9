//! Gives the library the name under which programs look for NVIDIA's driver.

fn main() {
    // Once it is loaded, from whatever file, `dlopen("libcuda.so.1")` finds this one by its name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The threads of streams run its code until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
