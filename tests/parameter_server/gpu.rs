//! The same on GPUs: on a stand-in for the driver where there is none, which tries all but the kernels' own text.

use rustix::process::Signal;
use tokio::time::timeout;

use crate::kill_workers;
use crate::site::{BATCHES, EPOCHS, LIMIT, Site, assert_ends_well, assert_trained, count, gradients, number_after};

/// With the stand-in, unless there is a driver.
fn site() -> Option<Site> {
    let mut site = Site::new()?;
    site.compute = "gpu";
    if tokio_rdma::gpu::driver_version().is_err() {
        site.driver = Some(fake_cuda::directory(&[]).unwrap());
    }
    Some(site)
}

/// As many as a test wants that is content with one.
fn gpus(site: &Site) -> usize {
    // The stand-in has two.
    if site.driver.is_some() { 2 } else { tokio_rdma::gpu::GpuDevice::count().min(2) }
}

#[tokio::test]
async fn one_command_trains_on_gpus_and_comes_out_the_same_each_time() {
    let Some(site) = site() else { return };
    let gpus = gpus(&site);
    let arguments = format!("--workers 4 --gpus {gpus} --epochs {EPOCHS} --rate 0.2 --log-every 1");
    let mut losses = Vec::new();
    for more in ["", "--per-process 2"] {
        let output = site.output(&format!("{arguments} {more}")).await;
        let (text, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{text}{complaints}");
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_trained(&lines);
        assert_eq!(count(&lines, "parameters live on GPU 0"), 1, "{text}");
        assert_eq!(count(&lines, "computes on GPU 0"), 4 / gpus, "{text}");
        assert_eq!(count(&lines, &format!("computes on GPU {}", gpus - 1)), 4 / gpus, "{text}");
        assert_eq!(gradients(&lines), BATCHES);
        let steps = lines.iter().filter(|line| line.starts_with("step "));
        losses.push(steps.map(|line| line.split(", ").nth(1).unwrap().to_owned()).collect::<Vec<_>>());
    }
    assert_eq!(losses[0].len() as u64, BATCHES / 4);
    assert_eq!(losses[0], losses[1]);
}

#[tokio::test]
async fn a_worker_on_a_gpu_that_is_killed_stops_nothing() {
    let Some(site) = site() else { return };
    kill_workers(&site, 3, 3).await;
}

/// From one processor's checkpoint to the other one, with a worker on each.
#[tokio::test]
async fn a_server_on_a_gpu_goes_on_from_a_checkpoint_and_leaves_one() {
    let Some(mut site) = site() else { return };
    let arguments = "--workers 2 --checkpoint state --checkpoint-every 10";
    let resume = format!("{arguments} --resume");
    let mut server = site.server(arguments);
    server.hear("parameters live on GPU 0").await;
    let workers = vec![site.worker(), {
        site.compute = "cpu";
        site.worker()
    }];
    let safe = number_after(&server.hear("checkpoint at step ").await, "checkpoint at step ");
    server.hear_step(safe + 13).await;
    server.kill().await;

    let mut server = site.server(&resume);
    server.hear("parameters live on the CPU").await;
    let resumed = number_after(&server.hear("resumed at step ").await, "resumed at step ");
    assert!(resumed >= safe, "{resumed} is before {safe}");
    server.hear_step(resumed + 7).await;
    // A step takes both, so that the training does not end before the signal is there.
    workers[0].signal(Signal::STOP);
    server.signal(Signal::TERM);
    let (_, lines) = server.end().await;
    let last = lines.iter().rev().find(|line| line.contains("step ")).unwrap();
    assert!(last.starts_with("checkpoint at step "), "{lines:#?}");
    workers[0].signal(Signal::CONT);

    site.compute = "gpu";
    let mut server = site.server(&resume);
    server.hear("parameters live on GPU 0").await;
    let line = server.hear("resumed at step ").await;
    assert_eq!(number_after(&line, "step "), number_after(last, "step "));
    let before = number_after(&line, "with ");
    let lines = server.end_trained().await;
    assert_eq!(before + gradients(&lines), BATCHES, "each batch once");
    assert_eq!((count(&lines, "computes on GPU 0"), count(&lines, "computes on the CPU")), (1, 1), "{lines:#?}");
    assert_ends_well(workers).await;
}

/// On a GPU this tries the kernels.
#[tokio::test]
async fn kernels_compute_what_the_cpu_does() {
    let Some(site) = site() else { return };
    let output = site.output("--check-kernels").await;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for words in ["gradient: off by", "take: lengths", "descend: off by"] {
        assert!(text.contains(words), "no {words} in {text}");
    }
}

/// What was asked for and is not there is said, and nothing else is taken in its place.
#[tokio::test]
async fn gpus_that_are_not_there_are_said_to_be_so() {
    let Some(site) = site() else { return };
    for (arguments, words) in [
        ("--gpus 64", "GPU 63 was asked for"),
        ("--role server --gpu 77", "GPU 77 was asked for"),
        ("--role worker --address unix:socket --gpu 77", "GPU 77 was asked for"),
        ("--compute cpu --gpus 1", "contradict each other"),
    ] {
        let output = site.output(arguments).await;
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && complaints.contains(words), "{arguments}: {output:?}");
    }
    if site.driver.is_some() {
        // No driver at all.
        let mut command = site.command("--role server");
        let output = timeout(LIMIT, command.env_remove("LD_LIBRARY_PATH").output()).await.expect("it takes too long");
        let output = output.unwrap();
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && complaints.contains("libcuda.so.1"), "{output:?}");
        assert!(complaints.contains("--compute cpu"), "{complaints}");
    }
}
