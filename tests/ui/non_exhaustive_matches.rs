//! Later versions may know more ends and more devices.

fn misuse(reason: tokio_rdma::CloseReason, provider: tokio_rdma::Provider) {
    match reason { //~ E0004
        tokio_rdma::CloseReason::Local
        | tokio_rdma::CloseReason::Peer
        | tokio_rdma::CloseReason::LinkLost(_)
        | tokio_rdma::CloseReason::Failed(_)
        | tokio_rdma::CloseReason::Protocol(_)
        | tokio_rdma::CloseReason::RuntimeGone
        | tokio_rdma::CloseReason::Device(_) => {}
    }
    match provider { //~ E0004
        tokio_rdma::Provider::Soft => {}
    }
}

fn main() {}
