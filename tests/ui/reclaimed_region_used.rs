//! A reclaimed region describes nothing any more.

async fn misuse(exposed: tokio_rdma::ExposedRegion) {
    let buffer = exposed.reclaim().await;
    let _remote = exposed.remote(); //~ E0382
    drop(buffer);
}

fn main() {}
