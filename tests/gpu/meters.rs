//! How often operations had to wait for a GPU, as the metrics facade gets to know it.

use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::join;
use tokio_rdma::metrics::GPU_WAITS;

use crate::common::Rig;
use crate::gpu::Gpu;

lone_gpu_cases!(waits_for_a_gpu_are_counted,);

const SLOW: Duration = Duration::from_millis(300);

/// Waits since the last look: for the GPU's work, and for what came.
fn waits(counts: &Snapshotter) -> [u64; 2] {
    let mut found = [0, 0];
    for (key, _, _, value) in counts.snapshot().into_vec() {
        if key.key().name() == GPU_WAITS {
            let what = key.key().labels().find(|label| label.key() == "for").map(|label| label.value());
            let DebugValue::Counter(count) = value else { panic!("{key:?}") };
            found[usize::from(what == Some("visible"))] += count;
        }
    }
    found
}

async fn waits_for_a_gpu_are_counted(rig: Rig) {
    let recorder = DebuggingRecorder::new();
    let counts = recorder.snapshotter();
    recorder.install().expect("this process is this case's alone");
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);

    let (source, target) = (gpu.alloc(&one.domain, 4096), gpu.alloc(&other.domain, 4096));
    let (received, sent) = join!(other.receive(target), one.send(source));
    let (mut source, _target) = (sent.unwrap(), received.unwrap());
    assert_eq!(waits(&counts), [0, 0], "the GPU had nothing to do");

    gpu.fill_late(&mut source, SLOW, 1);
    let target = gpu.alloc_staged(&other.domain, 4096);
    let (received, sent) = join!(other.receive(target), one.send(source));
    sent.unwrap();
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, 4096, 1), 0);
    assert_eq!(waits(&counts), [1, 1]);
}
