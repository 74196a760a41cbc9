//! Receives have a queue of their own, with another doorbell.

fn misuse(batch: &mut tokio_rdma::op::Batch, buffer: tokio_rdma::Buffer) {
    drop(batch.receive(buffer)); //~ E0599
}

fn main() {}
