//! Nothing is received or read into bytes that others look at.

async fn misuse(connection: &tokio_rdma::Connection, shared: tokio_rdma::SharedBuffer, remote: &tokio_rdma::RemoteRegion) {
    drop(connection.receive(shared.clone()).await); //~ E0277 E0277
    drop(connection.read(shared, remote).await); //~ E0277 E0277
}

fn main() {}
