//! Ranges and positions given by a caller, checked.

use std::ops::{Bound, Range, RangeBounds};

use crate::error::{Error, Result};

/// The range as `start..end` inside `0..len`, or an error that names what does not fit.
pub(super) fn resolve(operation: &'static str, range: impl RangeBounds<u64>, len: u64) -> Result<Range<u64>> {
    let too_large = |what| Error::Limit { operation, what, value: u64::MAX, limit: len, hint: "" };
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.checked_add(1).ok_or_else(|| too_large("start of the range"))?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.checked_add(1).ok_or_else(|| too_large("end of the range"))?,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    at_most(operation, "end of the range", end, len)?;
    if start > end {
        let hint = "a range starts at or before its end";
        return Err(Error::Limit { operation, what: "start of the range", value: start, limit: end, hint });
    }
    Ok(start..end)
}

/// As [`resolve`], for memory of this process.
pub(super) fn resolve_local(
    operation: &'static str,
    range: impl RangeBounds<usize>,
    len: usize,
) -> Result<Range<usize>> {
    let wide = (range.start_bound().map(|&at| at as u64), range.end_bound().map(|&at| at as u64));
    // Both ends are at most `len`, so they fit.
    resolve(operation, wide, len as u64).map(|range| range.start as usize..range.end as usize)
}

/// Refuses `value` when it is above `limit`.
pub(super) fn at_most(operation: &'static str, what: &'static str, value: u64, limit: u64) -> Result<()> {
    if value > limit { Err(Error::Limit { operation, what, value, limit, hint: "" }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_range_resolves() {
        assert_eq!(resolve("slice", .., 8).unwrap(), 0..8);
        assert_eq!(resolve("slice", 3.., 8).unwrap(), 3..8);
        assert_eq!(resolve("slice", ..=7, 8).unwrap(), 0..8);
        assert_eq!(resolve("slice", 8..8, 8).unwrap(), 8..8);
        assert_eq!(resolve("slice", (Bound::Excluded(2), Bound::Included(4)), 8).unwrap(), 3..5);
        assert_eq!(resolve_local("slice", 2..5, 8).unwrap(), 2..5);
    }

    #[test]
    #[allow(clippy::reversed_empty_ranges)]
    fn ranges_that_do_not_fit_are_errors() {
        for (range, what, value, limit) in [
            ((Bound::Included(0), Bound::Excluded(9)), "end of the range", 9, 8),
            ((Bound::Included(0), Bound::Included(u64::MAX)), "end of the range", u64::MAX, 8),
            ((Bound::Excluded(u64::MAX), Bound::Unbounded), "start of the range", u64::MAX, 8),
            ((Bound::Included(5), Bound::Excluded(4)), "start of the range", 5, 4),
            ((Bound::Included(9), Bound::Unbounded), "start of the range", 9, 8),
        ] {
            match resolve("slice", range, 8) {
                Err(Error::Limit { operation: "slice", what: w, value: v, limit: l, .. }) => {
                    assert_eq!((w, v, l), (what, value, limit));
                }
                other => panic!("{range:?}: {other:?}"),
            }
        }
        // The whole address space is one byte longer than any length that a u64 can say.
        assert!(resolve("slice", ..=u64::MAX, u64::MAX).is_err());
    }
}
