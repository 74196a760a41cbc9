//! A borrowed buffer cannot be made sound: the future can be forgotten while the device still reads.

async fn misuse(connection: &tokio_rdma::Connection, buffer: &tokio_rdma::Buffer, bytes: &[u8]) {
    drop(connection.send(buffer).await); //~ E0277 E0277
    drop(connection.send(bytes).await); //~ E0277 E0277
}

fn main() {}
