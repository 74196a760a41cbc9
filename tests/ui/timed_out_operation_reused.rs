//! A deadline takes the operation over.

async fn misuse(connection: &tokio_rdma::Connection, buffer: tokio_rdma::Buffer) {
    let send = connection.send(buffer);
    let limited = send.timeout(std::time::Duration::from_secs(1));
    drop(send.await); //~ E0382
    drop(limited.await);
}

fn main() {}
