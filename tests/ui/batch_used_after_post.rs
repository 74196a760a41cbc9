//! A posted batch takes no more members.

async fn misuse(connection: &tokio_rdma::Connection, buffer: tokio_rdma::Buffer) {
    let mut batch = connection.batch();
    let posted = batch.post();
    drop(batch.send(buffer)); //~ E0382
    drop(posted.await);
}

fn main() {}
