//! Exposing takes the buffer, until it is reclaimed.

fn misuse(mut buffer: tokio_rdma::Buffer) -> tokio_rdma::Result<tokio_rdma::ExposedRegion> {
    let exposed = buffer.expose(tokio_rdma::Access::REMOTE_READ)?;
    buffer.fill(0); //~ E0382
    Ok(exposed)
}

fn main() {}
