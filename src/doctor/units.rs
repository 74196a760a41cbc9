//! Numbers for people.

/// A size in the largest unit that divides it well: `80 GiB`, `256 MiB`, `139.8 GiB`.
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (0..UNITS.len()).rev().find(|power| bytes >> (10 * power) != 0).unwrap_or(0);
    let value = bytes as f64 / (1u64 << (10 * power)) as f64;
    let text = format!("{value:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[power])
}

/// `0-3,8` of the numbers of CPUs, which are in order.
pub(super) fn cpu_list(cpus: &[usize]) -> Option<String> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let shown: Vec<_> = ranges
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    (!shown.is_empty()).then(|| shown.join(","))
}

#[cfg(test)]
mod tests {
    use super::{bytes, cpu_list};

    #[test]
    fn sizes() {
        for (size, text) in [
            (0, "0 B"),
            (65_536, "64 KiB"),
            (256 << 20, "256 MiB"),
            (150_754_820_096, "140.4 GiB"),
            (u64::MAX, "16777216 TiB"),
        ] {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(cpu_list(&[0, 1, 2, 3, 8, 10, 11]).unwrap(), "0-3,8,10-11");
        assert_eq!(cpu_list(&[5]).unwrap(), "5");
        assert_eq!(cpu_list(&[]), None);
    }
}
