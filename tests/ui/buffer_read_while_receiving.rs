//! What is being received cannot be looked at before it is there.

async fn misuse(connection: &tokio_rdma::Connection, buffer: tokio_rdma::Buffer) -> u8 {
    let receive = connection.receive(buffer);
    let early = buffer[0]; //~ E0382
    drop(receive.await);
    early
}

fn main() {}
