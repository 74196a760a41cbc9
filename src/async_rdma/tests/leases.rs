//! Memory that is requested, lent, given back, released, and whose time is over.

use std::time::Duration;

use super::{MINUTE, buffer, connected, over, peers, until};
use crate::async_rdma::LeaseEnd;
use crate::{Access, Error};

const BUDGET: u64 = 64 << 10;

#[tokio::test]
async fn requested_regions_are_written_read_and_released() {
    let (client, server) = peers(|it| it.budget(BUDGET)).await;
    let region = client.request_region(5000, 64, MINUTE).await.unwrap();
    assert_eq!((region.len(), region.access()), (5000, Access::all()));
    assert!(region.remaining() > MINUTE - Duration::from_secs(5) && region.remaining() <= MINUTE);
    assert_eq!((server.stats().regions, server.stats().budget_used), (1, 8192), "whole pages");
    let bytes: Vec<u8> = (0..5000).map(|at| at as u8).collect();
    client.write(buffer(&client, &bytes), &region).await.unwrap();
    let part = region.slice(1000..1010).unwrap();
    let read = client.read(client.domain().alloc(10).unwrap(), &part).await.unwrap();
    assert_eq!(read[..], bytes[1000..1010]);
    assert_eq!(client.fetch_add(&region.slice(8..16).unwrap(), 1).await.unwrap(), 0x0f0e_0d0c_0b0a_0908);
    assert_eq!(client.compare_swap(&region.slice(8..16).unwrap(), 0, 0).await.unwrap(), 0x0f0e_0d0c_0b0a_0909);
    client.release(region).await.unwrap();
    assert_eq!((server.stats().regions, server.stats().budget_used), (0, 0));
    let failed = client.write(client.domain().alloc(1).unwrap(), &part).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Invalid { .. }), "a slice ends with its region: {failed}");
    assert_eq!(client.close_reason(), None);
}

#[tokio::test]
async fn dropping_the_last_part_of_a_region_releases_it() {
    let (client, server) = peers(|it| it.budget(BUDGET)).await;
    let region = client.request_region(100, 8, MINUTE).await.unwrap();
    let part = region.slice(..10).unwrap();
    drop(region);
    client.write(buffer(&client, b"still here"), &part).await.unwrap();
    assert_eq!(server.stats().regions, 1);
    drop(part);
    until(|| server.stats().regions == 0).await;
}

#[tokio::test]
async fn many_regions_dropped_at_both_ends_at_once_are_all_released() {
    const COUNT: u64 = 200;
    let (client, server) = peers(|it| it.budget(1 << 30)).await;
    let (mut of_client, mut of_server) = (Vec::new(), Vec::new());
    for _ in 0..COUNT {
        of_client.push(client.request_region(64, 8, MINUTE).await.unwrap());
        of_server.push(server.request_region(64, 8, MINUTE).await.unwrap());
    }
    drop((of_client, of_server));
    until(|| client.stats().regions == 0 && server.stats().regions == 0).await;
    client.send(buffer(&client, b"still there")).await.unwrap();
}

#[tokio::test]
async fn what_would_end_behind_a_region_is_never_posted() {
    let (client, _server) = peers(|it| it.budget(BUDGET)).await;
    let region = client.request_region(64, 64, MINUTE).await.unwrap();
    let failed = client.write(client.domain().alloc(65).unwrap(), &region).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Limit { what: "length", value: 65, limit: 64, .. }), "{failed}");
    let failed = client.read(client.domain().alloc(65).unwrap(), &region).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Limit { .. }), "{failed}");
    assert!(region.slice(60..70).is_err());
    assert_eq!(client.close_reason(), None);
}

#[tokio::test]
async fn the_budget_bounds_what_a_peer_gets() {
    let (here, there) = connected().await;
    let client = over(here, |it| it.answer_timeout(Duration::from_millis(200)));
    let server = over(there, |it| it.budget(BUDGET));
    let all = client.request_region(BUDGET, 4096, MINUTE).await.unwrap();
    for (len, align) in [(1, 1), (BUDGET + 1, 1), (u64::MAX, 1), (0, 1), (1, 0), (1, 3), (1, 8192)] {
        let refused = server.stats().refused;
        let error = client.request_region(len, align, MINUTE).await.map(drop).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{len} aligned to {align}: {error}");
        assert_eq!(server.stats().refused, refused + 1);
    }
    client.release(all).await.unwrap();
    client.request_region(BUDGET, 1, MINUTE).await.unwrap();
}

#[tokio::test]
async fn without_a_budget_a_peer_gets_nothing() {
    let (here, there) = connected().await;
    let client = over(here, |it| it.answer_timeout(Duration::from_millis(200)));
    let server = over(there, |it| it);
    assert!(client.request_region(1, 1, MINUTE).await.is_err());
    assert_eq!((server.stats().refused, server.stats().regions), (1, 0));
}

#[tokio::test]
async fn what_comes_back_holds_what_the_peer_wrote() {
    let (client, server) = peers(|it| it.budget(BUDGET)).await;
    let region = client.request_region(11, 1, MINUTE).await.unwrap();
    client.write(buffer(&client, b"from afar.."), &region).await.unwrap();
    let copy = region.clone();
    client.give_back(region).await.unwrap();
    assert_eq!(server.receive_returned().await.unwrap()[..], *b"from afar..");
    assert_eq!((server.stats().regions, server.stats().budget_used), (0, 0));
    assert!(matches!(client.give_back(copy).await, Err(Error::Invalid { .. })), "once");
}

#[tokio::test]
async fn what_is_lent_is_the_peers_until_it_says_otherwise() {
    let (client, server) = peers(|it| it).await;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    for (end, expected) in [(0, LeaseEnd::Released), (1, LeaseEnd::Returned), (2, LeaseEnd::Released)] {
        let lent = server.lend(buffer(&server, b"abcdef"), rights, MINUTE).await.unwrap();
        assert_eq!((lent.len(), lent.access()), (6, rights));
        let region = client.receive_region().await.unwrap();
        assert_eq!((region.len(), region.access()), (6, rights));
        lent.copy_from(0, b"A").unwrap();
        let read = client.read(client.domain().alloc(6).unwrap(), &region).await.unwrap();
        assert_eq!(read[..], *b"Abcdef");
        client.write(buffer(&client, b"xyz"), &region.slice(3..).unwrap()).await.unwrap();
        match end {
            0 => client.release(region).await.unwrap(),
            1 => client.give_back(region).await.unwrap(),
            _ => drop(region),
        }
        assert_eq!(lent.ended().await, expected);
        let mut bytes = [0; 3];
        lent.copy_to(3, &mut bytes).unwrap();
        assert_eq!(bytes, *b"xyz", "it can be looked at afterwards too");
        lent.copy_from(5, b"!").unwrap();
        assert!(lent.copy_to(4, &mut bytes).is_err() && lent.copy_from(u64::MAX, b"..").is_err());
        assert_eq!(lent.reclaim().await[..], *b"Abcxy!");
        assert_eq!(server.stats().regions, 0);
    }
}

#[tokio::test]
async fn the_end_of_a_lease_revokes_the_key() {
    let (client, server) = peers(|it| it).await;
    let short = Duration::from_millis(150);
    // A later deadline first: the alarm has to be set anew.
    let long = server.lend(buffer(&server, b"long"), Access::REMOTE_READ, MINUTE).await.unwrap();
    let lent = server.lend(buffer(&server, b"short"), Access::REMOTE_READ, short).await.unwrap();
    let (_, region) = (client.receive_region().await.unwrap(), client.receive_region().await.unwrap());
    client.read(client.domain().alloc(5).unwrap(), &region).await.unwrap();
    assert_eq!(lent.ended().await, LeaseEnd::Expired);
    assert!(region.remaining().is_zero());
    let failed = client.read(client.domain().alloc(5).unwrap(), &region).await.unwrap_err();
    assert!(failed.to_string().contains("is over"), "{failed}");
    assert_eq!(client.close_reason(), None, "it was not posted");
    assert_eq!((lent.reclaim().await.len(), long.reclaim().await.len()), (5, 4));
    assert_eq!(server.domain().stats().live_exposed, 0);
}

#[tokio::test]
async fn requested_regions_end_too_and_their_lease_is_capped() {
    let (client, server) = peers(|it| it.budget(BUDGET).longest_lease(Duration::from_millis(100))).await;
    let _kept = client.request_region(100, 1, Duration::MAX).await.unwrap();
    assert_eq!(server.stats().regions, 1);
    until(|| server.stats().regions == 0).await;
    assert_eq!((server.stats().budget_used, server.domain().stats().live_exposed), (0, 0));
}

#[tokio::test]
async fn what_is_reclaimed_or_dropped_is_out_of_reach() {
    let (client, server) = peers(|it| it).await;
    let lent = server.lend(buffer(&server, b"mine"), Access::REMOTE_READ, MINUTE).await.unwrap();
    let dropped = server.lend(buffer(&server, b"gone"), Access::REMOTE_READ, MINUTE).await.unwrap();
    assert_eq!(server.stats().regions, 2);
    drop(dropped);
    assert_eq!(lent.reclaim().await[..], *b"mine");
    assert_eq!((server.stats().regions, server.domain().stats().live_exposed), (0, 0));
    let region = client.receive_region().await.unwrap();
    let error = client.give_back(region).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}

#[test]
fn what_was_lent_survives_its_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let (peers, lent) = first.block_on(async {
        let (client, server) = peers(|it| it).await;
        let lent = server.lend(buffer(&server, b"kept"), Access::REMOTE_READ, MINUTE).await.unwrap();
        ((client, server), lent)
    });
    drop(first);
    second.block_on(async {
        assert_eq!(lent.ended().await, LeaseEnd::Closed);
        assert_eq!(lent.reclaim().await[..], *b"kept");
        assert!(peers.1.receive().await.is_err());
    });
}

#[tokio::test]
async fn rights_are_checked_on_both_sides() {
    let (client, server) = peers(|it| it).await;
    let failed = server.lend(buffer(&server, b"x"), Access::empty(), MINUTE).await.unwrap_err();
    assert_eq!(failed.into_buffer().unwrap()[..], *b"x");
    let _lent = server.lend(buffer(&server, b"read me"), Access::REMOTE_READ, MINUTE).await.unwrap();
    let region = client.receive_region().await.unwrap();
    let failed = client.write(buffer(&client, b"no"), &region).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Access { .. }), "{failed}");
}

#[tokio::test]
async fn a_region_belongs_to_its_peer() {
    let (client, _server) = peers(|it| it.budget(BUDGET)).await;
    let (other, _its_server) = peers(|it| it.budget(BUDGET)).await;
    let region = other.request_region(8, 8, MINUTE).await.unwrap();
    assert!(client.fetch_add(&region, 1).await.is_err());
    assert!(client.release(region.clone()).await.is_err());
    assert_eq!(other.fetch_add(&region, 1).await.unwrap(), 0, "and is unharmed");
}
