//! What operations accept.

use crate::error::{Error, Operation};
use crate::memory::domain::test_domain;
use crate::memory::*;

#[test]
fn operands_come_back_as_what_they_were() {
    fn there_and_back<T: Operand>(value: T) -> T {
        T::from_any(value.into_any()).unwrap()
    }
    let pd = test_domain();
    assert_eq!(there_and_back(pd.alloc(8).unwrap()).len(), 8);
    assert_eq!(there_and_back(pd.alloc(8).unwrap().freeze()).len(), 8);
    assert_eq!(there_and_back(SgList::new().with(pd.alloc(8).unwrap())).len_bytes(), 8);
    assert!(Buffer::from_any(pd.alloc(8).unwrap().freeze().into_any()).is_none());
    assert!(SgList::from_any(AnyBuffer::default()).is_none());
    assert_eq!(pd.stats(), DomainStats::default());
}

#[test]
fn scatter_gather_entries_name_the_bytes() {
    let (pd, other) = (test_domain(), test_domain());
    let mut head = pd.alloc(16).unwrap();
    let tail = head.split_off(10).unwrap();
    let empty = head.split_to(0).unwrap();
    let shared = pd.alloc(8).unwrap().freeze();
    let expected = [
        (head.address(), 10, head.region().lkey()),
        (tail.address(), 6, tail.region().lkey()),
        (shared.address(), 8, shared.region().lkey()),
    ];
    let list: SgList = [head, empty, tail].into_iter().collect();
    let any = list.into_any();
    any.check_writable("receive").unwrap();
    let any = SgList::from_any(any).unwrap().with(shared).into_any();
    match any.check_writable("receive") {
        Err(Error::Invalid { operation: "receive", reason }) => assert!(reason.contains("segment 3"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let mut list = Default::default();
    any.push_sges(&mut list);
    let sges: Vec<_> = list.iter().map(|s| (s.segment.address(), s.segment.len(), s.lkey)).collect();
    assert_eq!((sges.as_slice(), any.len()), (&expected[..], 24));
    any.check_domain(Operation::Send, pd.id()).unwrap();
    match SgList::from_any(any).unwrap().with(other.alloc(1).unwrap()).into_any().check_domain(Operation::Send, pd.id())
    {
        Err(Error::ForeignBuffer { buffer, connection, .. }) => assert_eq!((buffer, connection), (other.id(), pd.id())),
        result => panic!("{result:?}"),
    }
    let mut none = Default::default();
    AnyBuffer::None.push_sges(&mut none);
    assert!(none.is_empty());
    AnyBuffer::None.check_domain(Operation::Send, 0).unwrap();
    assert_eq!((pd.stats().live_buffers, other.stats().live_buffers), (0, 0));
}
