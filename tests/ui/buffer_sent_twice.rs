//! One buffer, two operations: one of them would change what the other one sends. A SharedBuffer can be cloned for that.

async fn misuse(connection: &tokio_rdma::Connection, buffer: tokio_rdma::Buffer) {
    let first = connection.send(buffer);
    let second = connection.send(buffer); //~ E0382
    drop((first.await, second.await));
}

fn main() {}
