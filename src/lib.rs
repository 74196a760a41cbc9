//! RDMA for tokio.
