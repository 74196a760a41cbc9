//! Registrations end with the memory: what comes to lie at the same address is another one's.

use tokio_rdma::gpu::GpuExposedRegion;
use tokio_rdma::{Access, Error, RemoteRegion, WcStatus};

use crate::common::Rig;
use crate::gpu::{Gpu, fake, pattern, skipped};

gpu_cases!(an_old_key_is_refused, keys_are_of_one_part);

const LEN: usize = 100_000;

async fn an_old_key_is_refused(rig: Rig) {
    let gpu = Gpu::open();
    let (client, server) = (rig.domain(), rig.domain());
    let mut again = 0;
    for round in 0..10 {
        let pair = rig.connect(&client, &server).await;
        let mut buffer = gpu.alloc(&server, LEN);
        gpu.fill(&gpu.stream(), &mut buffer, round);
        buffer.idle().await.unwrap();
        let old = buffer.expose(Access::all()).unwrap();
        let old_remote = old.remote();
        assert_eq!(
            gpu.mismatches(&pair.client.read(gpu.alloc(&client, LEN), &old_remote).await.unwrap(), LEN, round),
            0
        );
        drop(old);
        // Freed a moment later, by a thread for that. A machine that does not give the address again shows less.
        let mut next: GpuExposedRegion = gpu.exposed(&pair.server, LEN);
        for _ in 0..50 {
            if next.remote().address() == old_remote.address() {
                again += 1;
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            drop(next);
            next = gpu.exposed(&pair.server, LEN);
        }
        assert_ne!(next.remote().rkey(), old_remote.rkey());
        let source = client.register(pattern(LEN, 7)).unwrap();
        let error = match round % 2 {
            0 => pair.client.write(source, &old_remote).await.unwrap_err().into_parts().0,
            _ => pair.client.read(source, &old_remote).await.unwrap_err().into_parts().0,
        };
        assert!(matches!(error, Error::Completion { status: WcStatus::RemoteAccess, .. }), "{error}");
        let stream = gpu.stream();
        let bytes = stream.clone_dtoh(&next.read_on::<u8>(&stream).unwrap()).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "the new memory was written to");
    }
    if again == 0 {
        assert!(fake().is_none(), "the stand-in gives addresses again");
        skipped("no address was given again");
    }
}

async fn keys_are_of_one_part(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let mut head = gpu.alloc(&other.domain, 2 * LEN);
    let tail = head.split_off(LEN).unwrap().expose(Access::all()).unwrap();
    one.write(one.domain.register(pattern(LEN, 1)).unwrap(), &tail.remote()).await.unwrap();
    assert_eq!(gpu.mismatches_in(&tail, LEN, 1), 0);
    assert_eq!(gpu.contents(&head), [0; LEN]);
    // The other part's key is no key to this one: a description with the right key and the wrong address.
    let mut forged = tail.remote().to_bytes();
    forged[16..24].copy_from_slice(&head.address().to_le_bytes());
    let forged = RemoteRegion::from_bytes(&forged).unwrap();
    assert_eq!((forged.address(), forged.rkey()), (head.address(), tail.remote().rkey()));
    let error = one.write(one.domain.register(pattern(LEN, 2)).unwrap(), &forged).await.unwrap_err();
    assert!(matches!(error.error(), Error::Completion { status: WcStatus::RemoteAccess, .. }), "{error}");
    assert_eq!(gpu.contents(&head), [0; LEN]);
}
