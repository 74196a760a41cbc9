//! A descriptor's fields are checked when it is made.

fn misuse() -> tokio_rdma::RemoteRegion {
    tokio_rdma::RemoteRegion { address: u64::MAX, length: 2, rkey: 0, access: tokio_rdma::Access::all() } //~ E0451
}

fn main() {}
