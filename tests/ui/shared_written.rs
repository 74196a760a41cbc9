//! A frozen buffer stays as it is.

fn misuse(mut shared: tokio_rdma::SharedBuffer) {
    shared[0] = 1; //~ E0594
}

fn main() {}
