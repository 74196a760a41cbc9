//! A Buffer is the only way to its bytes.

fn misuse(buffer: &tokio_rdma::Buffer) -> tokio_rdma::Buffer {
    buffer.clone() //~ E0308
}

fn main() {}
