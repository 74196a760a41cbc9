//! Random numbers of the system.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::{Error, Result};

/// So many of its bytes. An interrupted call, or one that gives fewer, is followed by another.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::io("read", "the system's random numbers", error.into())),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_differ_up_to_the_last_byte() {
        let numbers = [(); 32].map(|()| super::bytes::<32>().unwrap());
        for at in 0..32 {
            // By chance, once in 2^248 times.
            assert!(numbers.iter().any(|number| number[at] != numbers[0][at]), "byte {at}");
        }
    }
}
