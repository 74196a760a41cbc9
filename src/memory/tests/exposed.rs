//! Exposed memory: bounds, alignment, races, and the way back.

use std::sync::Arc;
use std::task::Poll;
use std::thread;

use super::{limit_of, poll};
use crate::error::Error;
use crate::memory::domain::test_domain;
use crate::memory::*;

#[test]
fn exposing_and_reclaiming() {
    let pd = test_domain();
    let mut buffer = pd.alloc(100).unwrap();
    buffer[1] = 5;
    let (address, access) = (buffer.address(), Access::REMOTE_READ | Access::REMOTE_WRITE);
    let exposed = buffer.expose(access).unwrap();
    let remote = exposed.remote();
    assert_eq!((remote.address(), remote.len(), remote.access()), (address, 100, access));
    assert_eq!(RemoteRegion::new(address, 100, remote.rkey(), access).unwrap(), remote);
    assert_eq!(pd.stats(), DomainStats { live_regions: 1, live_buffers: 1, live_exposed: 1 });
    let mut byte = [0];
    exposed.copy_to(1, &mut byte).unwrap();
    assert_eq!(byte, [5]);

    let mut reclaim = exposed.reclaim();
    let Poll::Ready(buffer) = poll(&mut reclaim, &Arc::default()) else { panic!("revoking does not wait") };
    assert!(poll(&mut reclaim, &Arc::default()).is_pending());
    assert_eq!((buffer[1], pd.stats().live_exposed, pd.stats().live_buffers), (5, 0, 1));
    drop(buffer.expose(access).unwrap().reclaim());
    assert_eq!(pd.stats(), DomainStats::default());
}

#[test]
fn what_cannot_be_exposed_comes_back() {
    let pd = test_domain();
    let (error, mut buffer) = pd.alloc(8).unwrap().expose(Access::empty()).unwrap_err().into_parts();
    assert!(matches!(error, Error::Invalid { operation: "expose", .. }), "{error}");
    let strange = Access::REMOTE_READ | Access::from_bits_retain(1 << 20);
    let empty = buffer.split_off(8).unwrap();
    assert!(buffer.expose(strange).is_err());
    let error = empty.expose(Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error.error(), Error::Limit { operation: "expose", value: 0, .. }), "{error}");
    drop(error);
    assert_eq!(pd.stats(), DomainStats::default());
}

#[test]
fn exposed_memory_checks_every_offset() {
    let mut buffer = test_domain().alloc(33).unwrap();
    let exposed = buffer.split_off(1).unwrap().expose(Access::REMOTE_ATOMIC).unwrap();
    for (offset, len) in [(33, 0), (32, 1), (0, 33), (u64::MAX, 0), (u64::MAX, 1), (u64::MAX - 1, 8)] {
        let mut bytes = vec![0; len];
        let end = offset.saturating_add(len as u64);
        assert_eq!(limit_of(exposed.copy_to(offset, &mut bytes).unwrap_err()), ("copy_to", end, 32));
        assert_eq!(limit_of(exposed.copy_from(offset, &bytes).unwrap_err()), ("copy_from", end, 32));
    }
    exposed.copy_to(32, &mut []).unwrap();
    exposed.copy_from(0, &[0xff; 32]).unwrap();
    for offset in [25, 31, u64::MAX - 7, u64::MAX] {
        assert_eq!(limit_of(exposed.load(offset).unwrap_err()).0, "load");
        assert_eq!(limit_of(exposed.compare_exchange(offset, 0, 1).unwrap_err()).0, "compare_exchange");
    }
    // The region begins one byte after an aligned address.
    for offset in [0, 8, 17] {
        assert!(matches!(exposed.store(offset, 0), Err(Error::Invalid { operation: "store", .. })));
    }
    for offset in [7, 15, 23] {
        exposed.store(offset, 1 << 40).unwrap();
        assert_eq!(exposed.fetch_add(offset, u64::MAX).unwrap(), 1 << 40);
        assert_eq!(exposed.load(offset).unwrap(), (1 << 40) - 1);
        assert_eq!(exposed.compare_exchange(offset, 0, 3).unwrap(), Err((1 << 40) - 1));
        assert_eq!(exposed.compare_exchange(offset, (1 << 40) - 1, 3).unwrap(), Ok((1 << 40) - 1));
        let mut bytes = [0; 8];
        exposed.copy_to(offset, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 3);
    }
}

#[test]
fn threads_race_on_exposed_memory() {
    const ROUNDS: u64 = if cfg!(miri) { 50 } else { 20_000 };
    let exposed = test_domain().alloc(64).unwrap().expose(Access::REMOTE_ATOMIC).unwrap();
    thread::scope(|scope| {
        for id in 0..4u8 {
            let exposed = &exposed;
            scope.spawn(move || {
                let offset = 16 + u64::from(id) * 3; // neighbours inside of the same words
                for round in 0..ROUNDS {
                    exposed.fetch_add(0, 1).unwrap();
                    let mut current = exposed.load(8).unwrap();
                    while let Err(now) = exposed.compare_exchange(8, current, current + 2).unwrap() {
                        current = now;
                    }
                    let mark = [id, round as u8, id];
                    exposed.copy_from(offset, &mark).unwrap();
                    let mut back = [0; 3];
                    exposed.copy_to(offset, &mut back).unwrap();
                    assert_eq!(back, mark, "somebody else's write lost or mixed it");
                    exposed.copy_from(40, &[id; 20]).unwrap();
                    exposed.copy_to(33, &mut [0; 31]).unwrap();
                }
            });
        }
    });
    assert_eq!((exposed.load(0).unwrap(), exposed.load(8).unwrap()), (4 * ROUNDS, 8 * ROUNDS));
}
