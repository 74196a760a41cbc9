//! What an operation accepts is sealed: the device's safety rests on how these types hold their memory.

struct Mine(Vec<u8>);

impl tokio_rdma::SourceBuffer for Mine {} //~ E0277

fn main() {
    drop(Mine(Vec::new()));
}
