//! A buffer that is being sent belongs to the device.

async fn misuse(connection: &tokio_rdma::Connection, mut buffer: tokio_rdma::Buffer) {
    let send = connection.send(buffer);
    buffer[0] = 1; //~ E0382
    drop(send.await);
}

fn main() {}
