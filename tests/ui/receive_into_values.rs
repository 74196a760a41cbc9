//! Only bytes are received, never values with pointers in them.

async fn misuse(connection: &tokio_rdma::Connection, names: Vec<String>) {
    drop(connection.receive(names).await); //~ E0277 E0277
}

fn main() {}
