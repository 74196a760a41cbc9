//! Two threads write one place without any order between them: the thread sanitizer must report it.

struct Shared(*mut u64);
// SAFETY: none; the race is the point.
unsafe impl Send for Shared {}

fn main() {
    let place = Box::into_raw(Box::new(0_u64));
    let shared = Shared(place);
    let thread = std::thread::spawn(move || {
        let shared = shared;
        // SAFETY: the place lives until the end of `main`; the race is the point.
        unsafe { *shared.0 += 1 }
    });
    // SAFETY: as above.
    unsafe { *place += 1 }
    thread.join().unwrap();
    // SAFETY: made by `Box::into_raw` above, and the only other user has ended.
    drop(unsafe { Box::from_raw(place) });
}
