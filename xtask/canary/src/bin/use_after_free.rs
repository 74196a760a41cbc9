//! Reads memory that was freed: the address sanitizer must report it.

fn main() {
    let place = Box::into_raw(Box::new(1_u64));
    // SAFETY: made by `Box::into_raw` above.
    drop(unsafe { Box::from_raw(place) });
    // SAFETY: none; the fault is the point.
    let value = unsafe { place.read_volatile() };
    println!("{value}");
}
