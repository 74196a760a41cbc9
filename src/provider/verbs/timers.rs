//! Times and sizes as the wire format encodes them.

use std::time::Duration;

use super::sys;

/// RNR NAK timer field, in units of 10 us (InfiniBand specification, volume 1, table 45); 0, the longest, is left out.
const RNR: [u32; 31] = [
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768, 49152,
];

/// The shortest timer that is not shorter than asked for.
pub(super) fn rnr_timer(timer: Duration) -> u8 {
    let steps = timer.as_nanos().div_ceil(10_000);
    let index = RNR.iter().position(|&step| u128::from(step) >= steps).unwrap_or(RNR.len() - 1);
    index as u8 + 1
}

/// Local ACK timeout field: 4.096 us x 2^n, rounded up. 0 would mean no timeout at all.
pub(super) fn ack_timeout(timeout: Duration) -> u8 {
    (1..=31).find(|&n| 4096u128 << n >= timeout.as_nanos()).unwrap_or(31)
}

/// `enum ibv_mtu`, rounded down.
pub(super) fn mtu_from_bytes(bytes: u32) -> sys::ibv_mtu {
    match bytes {
        4096.. => sys::IBV_MTU_4096,
        2048.. => sys::IBV_MTU_2048,
        1024.. => sys::IBV_MTU_1024,
        512.. => sys::IBV_MTU_512,
        _ => sys::IBV_MTU_256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers_round_up() {
        for (micros, field) in
            [(1, 1), (10, 1), (11, 2), (41, 5), (960, 13), (961, 14), (491_520, 31), (10_000_000, 31)]
        {
            assert_eq!(rnr_timer(Duration::from_micros(micros)), field, "{micros} us");
        }
    }

    #[test]
    fn ack_timeouts_round_up() {
        for (micros, field) in [(1, 1), (8, 1), (9, 2), (536_870, 17), (536_871, 18), (u64::MAX, 31)] {
            assert_eq!(ack_timeout(Duration::from_micros(micros)), field, "{micros} us");
        }
    }

    #[test]
    fn mtus_round_down() {
        for (bytes, mtu) in [(1, 1), (256, 1), (1500, 3), (4095, 4), (9000, 5)] {
            assert_eq!(mtu_from_bytes(bytes), mtu, "{bytes}");
        }
    }
}
