//! Figures as people read them.

use std::time::Duration;

pub fn micros(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

pub fn size(bytes: usize) -> String {
    let trimmed = |text: String| text.trim_end_matches('0').trim_end_matches('.').to_owned();
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => trimmed(format!("{:.4}", bytes as f64 / 1024.0)) + " KiB",
        _ => trimmed(format!("{:.1}", bytes as f64 / 1_048_576.0)) + " MiB",
    }
}

#[test]
fn sizes_are_short_where_they_are_whole() {
    assert_eq!([8, 4096, 1500, 3 << 20].map(size), ["8 B", "4 KiB", "1.4648 KiB", "3 MiB"]);
    assert_eq!(size((1 << 20) + (1 << 19)), "1.5 MiB");
}
