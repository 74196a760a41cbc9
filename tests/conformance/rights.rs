//! What a peer may do with memory is checked where the memory is, whatever its descriptor claims.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::join;
use tokio_rdma::{Access, CloseReason, Error, ExposedRegion, Provider, RemoteRegion, WcStatus};

use crate::common::rig::contents;
use crate::common::run::SOON;
use crate::common::{Pair, Rig, exercise, within};

cases!(
    claimed_rights_are_not_granted_rights,
    bytes_outside_of_the_region_are_out_of_reach,
    a_guessed_key_opens_nothing,
    a_key_is_worthless_in_another_domain,
    a_revoked_key_opens_nothing,
    dropping_the_region_revokes_its_key,
    revoking_cuts_a_transfer_in_the_middle,
    revoking_one_key_leaves_the_others,
    empty_one_sided_operations_need_a_notice,
);

/// The operation fails with a remote access error, and both ends say why they closed.
async fn refused(pair: &Pair, error: Error, status: WcStatus) {
    let Error::Completion { status: found, remote, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*found, remote.is_some()), (status, true), "{error}");
    assert!(error.is_caller_error(), "no reason to reconnect");
    within(SOON, async {
        assert_eq!(pair.client.closed().await, CloseReason::Failed(status));
        let reason = pair.server.closed().await;
        // A NIC may leave it to the peer's goodbye; Soft-RoCE has no event for a refused request.
        let untold = pair.server.provider() == Provider::Verbs && reason == CloseReason::Peer;
        assert!(untold || reason == CloseReason::Failed(status), "{reason:?}");
    })
    .await;
    assert_eq!(pair.client.close_reason(), Some(CloseReason::Failed(status)));
}

/// The same memory and key, described as granting everything.
fn claim_everything(region: &ExposedRegion) -> RemoteRegion {
    let remote = region.remote();
    RemoteRegion::new(remote.address(), remote.len(), remote.rkey(), Access::all()).unwrap()
}

async fn claimed_rights_are_not_granted_rights(rig: Rig) {
    let all = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    for missing in all {
        let pair = rig.pair().await;
        let one = &pair.client;
        let region = pair.server.filled(8, 1).expose(Access::all() - missing).unwrap();
        let before = contents(&region);
        let forged = claim_everything(&region);
        let error = match missing {
            Access::REMOTE_WRITE => one.write(one.buffer(8), &forged).await.unwrap_err().into(),
            Access::REMOTE_READ => one.read(one.buffer(8), &forged).await.unwrap_err().into(),
            _ => one.fetch_add(&forged, 1).await.unwrap_err(),
        };
        refused(&pair, error, WcStatus::RemoteAccess).await;
        assert_eq!(contents(&region), before);
    }
    for swap in [false, true] {
        let pair = rig.pair().await;
        let region = pair.server.buffer(8).expose(Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
        let forged = claim_everything(&region);
        let error = match swap {
            true => pair.client.compare_swap(&forged, 0, 1).await.unwrap_err(),
            false => {
                // Not even a notice comes when its bytes are refused.
                let read_only = pair.server.buffer(8).expose(Access::REMOTE_READ).unwrap();
                let buffer = pair.client.buffer(8);
                let forged = claim_everything(&read_only);
                let (written, notice) = join!(
                    pair.client.write_with_immediate(buffer, &forged, 1),
                    pair.server.receive(pair.server.buffer(8))
                );
                // Soft-RoCE ends the receive that the notice would have used with the reason, others flush it.
                let error = notice.unwrap_err();
                let told = matches!(error.error(), Error::Completion { status: WcStatus::RemoteAccess, .. });
                assert!(told && rig.on_nic() || matches!(error.error(), Error::Closed { .. }), "{error:?}");
                written.unwrap_err().into()
            }
        };
        refused(&pair, error, WcStatus::RemoteAccess).await;
    }
}

async fn bytes_outside_of_the_region_are_out_of_reach(rig: Rig) {
    // The exposed part has neighbours in the same registration, in front and behind.
    for (shift, len) in [(-1i64, 64u64), (0, 65), (64, 1), (1, 64), (-64, 64), (i64::MIN, 8)] {
        let pair = rig.pair().await;
        let mut front = pair.server.filled(192, 1);
        let mut middle = front.split_off(64).unwrap();
        let back = middle.split_off(64).unwrap();
        let region = middle.expose(Access::all()).unwrap();
        let remote = region.remote();
        let address = remote.address().wrapping_add_signed(shift);
        let forged = RemoteRegion::new(address, len, remote.rkey(), Access::all()).unwrap();
        let one = &pair.client;
        let mut ones = one.buffer(len as usize);
        ones.fill(0xff);
        let error = one.write(ones, &forged).await.unwrap_err();
        refused(&pair, error.into(), WcStatus::RemoteAccess).await;
        let whole = front.unsplit(region.reclaim().await).unwrap().unsplit(back).unwrap();
        crate::common::assert_pattern(&whole, 1);

        let pair = rig.pair().await;
        let region = pair.server.exposed(64);
        let address = region.remote().address().wrapping_add_signed(shift);
        let forged = RemoteRegion::new(address, len, region.remote().rkey(), Access::all()).unwrap();
        let error = pair.client.read(pair.client.buffer(len as usize), &forged).await.unwrap_err();
        refused(&pair, error.into(), WcStatus::RemoteAccess).await;
    }
}

async fn a_guessed_key_opens_nothing(rig: Rig) {
    let server = rig.domain();
    let region = server.alloc(64).unwrap().expose(Access::all()).unwrap();
    let remote = region.remote();
    let mut random = fastrand::Rng::with_seed(3);
    let near = [1, 2, 0x100, 0x1_0000, 0x100_0000].map(|step| remote.rkey().wrapping_add(step));
    let guesses = near.into_iter().chain([0, u32::MAX, region.region().lkey()]).chain((0..20).map(|_| random.u32(..)));
    for rkey in guesses.filter(|&rkey| rkey != remote.rkey()) {
        let pair = rig.connect(&rig.domain(), &server).await;
        let guess = RemoteRegion::new(remote.address(), 64, rkey, Access::all()).unwrap();
        let error = pair.client.write(pair.client.filled(64, 1), &guess).await.unwrap_err();
        refused(&pair, error.into(), WcStatus::RemoteAccess).await;
    }
    assert_eq!(contents(&region), [0; 64]);
}

async fn a_key_is_worthless_in_another_domain(rig: Rig) {
    let device = rig.device();
    let (mine, theirs) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let region = theirs.alloc(64).unwrap().expose(Access::all()).unwrap();
    let pair = rig.connect(&rig.domain(), &mine).await;
    let error = pair.client.write(pair.client.filled(64, 1), &region.remote()).await.unwrap_err();
    refused(&pair, error.into(), WcStatus::RemoteAccess).await;
    assert_eq!(contents(&region), [0; 64]);
    // With a connection of the right domain it opens.
    let pair = rig.connect(&rig.domain(), &theirs).await;
    pair.client.write(pair.client.filled(64, 1), &region.remote()).await.unwrap();
}

async fn a_revoked_key_opens_nothing(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(64);
    let stale = region.remote();
    let buffer = region.reclaim().await;
    // The same memory, exposed again: the old key stays worthless.
    let again = buffer.expose(Access::all()).unwrap();
    assert_ne!(again.remote().rkey(), stale.rkey());
    assert_eq!(again.remote().address(), stale.address());
    let error = pair.client.write(pair.client.filled(64, 1), &stale).await.unwrap_err();
    assert!(error.to_string().contains(&format!("rkey {:#x}", stale.rkey())), "{error}");
    refused(&pair, error.into(), WcStatus::RemoteAccess).await;
    assert_eq!(contents(&again), [0; 64]);
}

async fn dropping_the_region_revokes_its_key(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(64);
    let stale = region.remote();
    drop(region);
    assert_eq!(pair.server.domain.stats().live_regions, 0);
    let error = pair.client.read(pair.client.buffer(64), &stale).await.unwrap_err();
    refused(&pair, error.into(), WcStatus::RemoteAccess).await;
}

/// When reclaiming has returned, the buffer is this side's alone, also while the peer is writing as fast as it can.
async fn revoking_cuts_a_transfer_in_the_middle(rig: Rig) {
    const LEN: usize = 4 << 20;
    for _ in 0..5 {
        let pair = rig.pair().await;
        let region = pair.server.exposed(LEN);
        let remote = region.remote();
        let one = pair.client.clone();
        let started = std::sync::Arc::new(AtomicBool::new(false));
        let flag = started.clone();
        let writer = tokio::spawn(async move {
            let mut buffer = one.buffer(LEN);
            buffer.fill(0xee);
            loop {
                buffer = match one.write(buffer, &remote).await {
                    Ok(buffer) => buffer,
                    Err(error) => return Error::from(error),
                };
                flag.store(true, Ordering::SeqCst);
            }
        });
        while !started.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut buffer = region.reclaim().await;
        buffer.fill(0x11);
        let error = within(SOON, writer).await.unwrap();
        refused(&pair, error, WcStatus::RemoteAccess).await;
        assert!(buffer.iter().all(|&byte| byte == 0x11), "written after the key was revoked");
    }
}

async fn revoking_one_key_leaves_the_others(rig: Rig) {
    let pair = rig.pair().await;
    let regions: Vec<_> = (0..100).map(|_| pair.server.exposed(8)).collect();
    let mut kept = Vec::new();
    for (at, region) in regions.into_iter().enumerate() {
        if at % 2 == 0 {
            kept.push(region);
        }
    }
    for region in &kept {
        pair.client.write(pair.client.filled(8, 2), &region.remote()).await.unwrap();
    }
    exercise(&pair).await;
}

async fn empty_one_sided_operations_need_a_notice(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    let error = pair.client.write(pair.client.empty(), &region.remote()).await.unwrap_err();
    assert!(matches!(error.error(), Error::Limit { value: 0, limit: 1, .. }), "{error}");
    let error = pair.client.read(pair.client.empty(), &region.remote()).await.unwrap_err();
    assert!(matches!(error.error(), Error::Limit { value: 0, limit: 1, .. }), "{error}");
    exercise(&pair).await;
}
