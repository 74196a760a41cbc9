//! Registering memory by pointer is the caller's promise.

fn misuse(domain: &tokio_rdma::ProtectionDomain, ptr: std::ptr::NonNull<u8>) {
    drop(domain.register_raw(ptr, 64, ())); //~ E0133
}

fn main() {}
