//! Forgets an allocation: the leak sanitizer must report it.

fn main() {
    std::mem::forget(std::hint::black_box(vec![1_u8; 100]));
}
