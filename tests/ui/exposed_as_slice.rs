//! A peer may change exposed memory at any time, so there is no slice of it.

fn misuse(exposed: &tokio_rdma::ExposedRegion) -> u8 {
    exposed[0] //~ E0608
}

fn main() {}
