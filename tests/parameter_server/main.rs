//! The parameter server, as its user starts it: whole trainings, and what is left of one when its processes are killed.

#[path = "../common/example.rs"]
mod example;
#[cfg(feature = "cuda")]
mod gpu;
mod site;

use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::time::timeout;
use tokio_rdma::{Connection, Device};

use self::site::{
    BATCHES, EPOCHS, LIMIT, Process, Site, assert_ends_well, assert_trained, count, gradients, number_after,
};

#[tokio::test]
async fn one_command_trains_with_four_workers() {
    let Some(site) = Site::new() else { return };
    let output = site.output(&format!("--workers 4 --epochs {EPOCHS} --rate 0.2 --plot loss.svg")).await;
    let (text, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{complaints}");
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_trained(&lines);
    assert_eq!(count(&lines, "computes on the CPU"), 4, "{text}");
    assert_eq!(gradients(&lines), BATCHES);
    assert_eq!(count(&lines, "stalest gradient lay 0 steps behind"), 1, "{text}");
    let steps = lines.iter().find(|line| line.contains(" steps, synchronous")).unwrap();
    assert_eq!(number_after(steps, ""), BATCHES / 4, "four gradients for each step");
    assert_is_picture(&site.file("loss.svg"));
}

#[track_caller]
fn assert_is_picture(file: &Path) {
    let drawn = std::fs::read_to_string(file).unwrap();
    let document = roxmltree::Document::parse(&drawn).unwrap();
    assert!(document.root_element().has_tag_name("svg"));
    let lines = document.descendants().filter(|it| it.tag_name().name() == "polyline").count();
    assert!(lines >= 2, "{lines} lines");
}

#[tokio::test]
async fn a_worker_that_is_killed_stops_nothing() {
    let Some(site) = Site::new() else { return };
    kill_workers(&site, 4, 10).await;
}

/// So many times one of the workers is killed somewhere in a step, and another one takes its place.
async fn kill_workers(site: &Site, there: usize, times: usize) {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut server = site.server(&format!("--workers {there}"));
    server.hear("listening on ").await;
    let mut workers: Vec<Process> = (0..there).map(|_| site.worker()).collect();
    let mut step = 0;
    for _ in 0..times {
        step = server.hear_step(step + random.u64(1..=10)).await;
        // While one is stopped the training cannot end before the other has joined.
        workers[0].signal(Signal::STOP);
        let mut victim = workers.swap_remove(random.usize(1..workers.len()));
        victim.kill().await;
        workers.push(site.worker());
        server.hear(" joined: ").await;
        workers[0].signal(Signal::CONT);
    }
    let lines = server.end_trained().await;
    assert_eq!(gradients(&lines), BATCHES, "each batch once: {lines:#?}");
    assert_eq!(count(&lines, " left: "), times, "{lines:#?}");
    assert_eq!(count(&lines, " joined: "), there + times, "{lines:#?}");
    assert_ends_well(workers).await;
}

/// With bounded staleness: one begins, others join, and one is stopped until its work is given to another.
#[tokio::test]
async fn workers_join_late_and_a_stopped_one_is_replaced() {
    const STALENESS: u64 = 5;
    let Some(site) = Site::new() else { return };
    let mut server = site.server(&format!("--workers 1 --mode bounded --staleness {STALENESS} --patience 5"));
    server.hear("listening on ").await;
    let mut workers = vec![site.worker()];
    server.hear_step(20).await;
    workers.extend((0..3).map(|_| site.worker()));
    server.hear("worker 3 joined").await;
    server.hear(", 4 workers").await;

    workers[0].signal(Signal::STOP);
    // It was stopped while it had work, or when it was to get some.
    let line = server.hear("worker 0 left: ").await;
    assert!(line.contains("no gradient within 5s") || line.contains("took no order"), "{line}");
    server.hear(", 3 workers").await;
    // While one is stopped the training cannot end before the other has joined.
    workers[1].signal(Signal::STOP);
    workers[0].signal(Signal::CONT);
    server.hear("worker 4 joined").await;
    workers[1].signal(Signal::CONT);

    let lines = server.end_trained().await;
    assert_eq!(gradients(&lines), BATCHES);
    let line = lines.iter().find(|line| line.contains("the stalest gradient lay")).unwrap();
    let stalest = number_after(line, "the stalest gradient lay ");
    assert!((1..=STALENESS).contains(&stalest), "{line}");
    assert_ends_well(workers).await;
}

/// A server that is killed loses no step before its last checkpoint, one that is asked to end loses none. The workers wait for the next one.
#[tokio::test]
async fn a_server_goes_on_from_its_checkpoint() {
    let Some(site) = Site::new() else { return };
    let arguments = "--workers 3 --checkpoint state --checkpoint-every 10";
    let resume = format!("{arguments} --resume");
    let mut server = site.server(arguments);
    server.hear("listening on ").await;
    let workers: Vec<Process> = (0..3).map(|_| site.worker()).collect();
    server.hear("checkpoint at step ").await;
    let line = server.hear("checkpoint at step ").await;
    let safe = number_after(&line, "checkpoint at step ");
    // Into the middle of something.
    server.hear_step(safe + 13).await;
    server.kill().await;

    let mut server = site.server(&resume);
    let line = server.hear("resumed at step ").await;
    let resumed = number_after(&line, "resumed at step ");
    assert!(resumed >= safe, "{line}, and there was a checkpoint of step {safe}");
    server.hear_step(resumed + 7).await;
    // A step takes all three, so that the training does not end before the signal is there.
    workers[0].signal(Signal::STOP);
    server.signal(Signal::TERM);
    let (status, lines) = server.end().await;
    assert_eq!(status.code(), Some(1));
    let last = lines.iter().rev().find(|line| line.contains("step ")).unwrap();
    assert!(last.starts_with("checkpoint at step "), "{lines:#?}");
    workers[0].signal(Signal::CONT);

    let mut server = site.server(&resume);
    let line = server.hear("resumed at step ").await;
    assert_eq!(number_after(&line, "step "), number_after(last, "step "));
    let before = number_after(&line, "with ");
    let lines = server.end_trained().await;
    assert_eq!(before + gradients(&lines), BATCHES, "each batch once");
    assert_ends_well(workers).await;
}

/// One whose workers are all gone gives up, and can be gone on with.
#[tokio::test]
async fn a_server_without_workers_gives_up_with_a_checkpoint() {
    let Some(site) = Site::new() else { return };
    let mut server = site.server("--workers 1 --wait 1 --checkpoint state --checkpoint-every 1000000");
    server.hear("listening on ").await;
    let mut worker = site.worker();
    server.hear_step(60).await;
    worker.kill().await;
    let (status, lines) = server.end().await;
    assert_eq!(status.code(), Some(1));
    assert!(lines.last().unwrap().starts_with("checkpoint at step "), "{lines:#?}");

    let resume = "--role server --address unix:socket --workers 1 --wait 1 --checkpoint state --resume";
    for (epochs, words) in [(1, "the limit is 45; go on with as many --epochs"), (16, "0 of 1 workers within 1s")] {
        let output = site.output(&format!("{resume} --epochs {epochs}")).await;
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && complaints.contains(words), "{complaints}");
    }
    // One that forgot --resume has nothing that is worth more.
    let saved = std::fs::read(site.file("state")).unwrap();
    let output = site.output("--role server --address unix:socket --workers 1 --wait 1 --checkpoint state").await;
    assert!(String::from_utf8_lossy(&output.stderr).contains("before the first step"), "{output:?}");
    assert!(std::fs::read(site.file("state")).unwrap() == saved, "the checkpoint was replaced");
}

/// The processes whose command line has these words.
fn processes(words: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let line = std::fs::read(entry.unwrap().path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    entries.filter(|line| line.contains(words)).collect()
}

/// Whatever ends the process that started the others: they end too, and the server writes a checkpoint first.
async fn nothing_is_left_after(signal: Signal) {
    let Some(site) = Site::new() else { return };
    let state = site.file("state");
    let arguments = format!("--workers 2 --epochs 100000 --log-every 1 --checkpoint {}", state.display());
    let arguments = format!("{arguments} --checkpoint-every 1000000000");
    let mut all = Process::start(site.command(&arguments));
    all.hear_step(5).await;
    let words = state.to_str().unwrap();
    assert_eq!(processes(words).len(), 4, "itself, the server and two workers");
    all.signal(signal);
    let (status, _) = all.end().await;
    assert!(!status.success(), "{status}");
    let gone = async {
        while !processes(words).is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, gone).await.unwrap_or_else(|_| panic!("{:#?}", processes(words)));
    assert!(state.exists());
}

#[tokio::test]
async fn a_launcher_that_is_told_to_end_leaves_nothing() {
    nothing_is_left_after(Signal::TERM).await;
}

#[tokio::test]
async fn a_launcher_that_is_killed_leaves_nothing() {
    nothing_is_left_after(Signal::KILL).await;
}

/// The script that is shipped; each process in a network of its own.
#[tokio::test]
async fn a_training_over_several_networks() {
    let Some(site) = Site::new() else { return };
    let ip = |arguments: &str| {
        let mut ip = std::process::Command::new("ip");
        ip.args(arguments.split(' ')).output().is_ok_and(|output| output.status.success())
    };
    let probe = format!("pstest{}", std::process::id());
    if !ip(&format!("netns add {probe}")) {
        return eprintln!("skipped: needs root and iproute2, to make network namespaces");
    }
    assert!(ip(&format!("netns delete {probe}")));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/parameter_server/cluster/netns.sh");
    let mut command = Command::new(script);
    command.args(["2", "--epochs", "2", "--plot", "loss.svg"]).current_dir(&site.folder).env("PROGRAM", &site.program);
    let running = command.kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let namespaces = format!("ps{}-", running.id().unwrap());
    let script = Pid::from_raw(running.id().unwrap() as i32).unwrap();
    let mut ending = std::pin::pin!(running.wait_with_output());
    let output = match timeout(LIMIT, &mut ending).await {
        Ok(output) => output.unwrap(),
        Err(_) => {
            // So that it cleans up; it is killed when that takes too long as well.
            kill_process(script, Signal::TERM).unwrap();
            let ended = timeout(LIMIT, ending).await;
            panic!("it takes too long: {ended:?}");
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("listening on 10.77.0.1:7471") && text.contains("90 gradients in "), "{text}");
    assert!(text.trim_end().lines().last().unwrap().starts_with("test accuracy "), "{text}");
    let left = std::process::Command::new("ip").args(["netns", "list"]).output().unwrap().stdout;
    assert!(!String::from_utf8_lossy(&left).contains(&namespaces), "namespaces are left");
}

#[tokio::test]
async fn strangers_are_refused_and_wrong_calls_say_why() {
    let Some(site) = Site::new() else { return };
    let mut server = site.server("--workers 1 --epochs 1");
    server.hear("listening on ").await;
    let pd = Device::open("soft0").unwrap().alloc_pd().unwrap();
    let address = format!("unix:{}", site.file("socket").display());
    let stranger = Connection::connect(&pd, address.as_str()).await.unwrap();
    server.hear("worker 0 was refused: a short hello").await;
    timeout(LIMIT, stranger.closed()).await.unwrap();
    let worker = site.worker();
    server.hear("worker 1 joined").await;
    assert!(server.end().await.0.success());
    assert_ends_well(vec![worker]).await;

    std::fs::write(site.file("damaged"), "PSCHECK1 and nothing that makes sense, but long enough").unwrap();
    for (arguments, words) in [
        ("--role worker", "needs --address"),
        ("--role worker --address 127.0.0.1:0", "needs the port"),
        ("--role worker --address unix:nobody --wait 1", "no connection to unix:nobody within 1s"),
        ("--role server --workers 2 --wait 1", "0 of 2 workers within 1s"),
        ("--role server --checkpoint missing --resume", "read the checkpoint missing"),
        ("--role server --checkpoint damaged --resume", "its SHA-256 is wrong"),
        ("--workers 1 --device nonesuch", "nonesuch"),
        ("--workers 0", "--workers"),
    ] {
        let output = site.output(arguments).await;
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && complaints.contains(words), "{arguments}: {complaints}");
        assert!(!complaints.contains("panicked"), "{arguments}: {complaints}");
    }
}

#[cfg(not(feature = "cuda"))]
#[tokio::test]
async fn a_program_without_gpus_says_so_when_one_is_asked_for() {
    let Some(site) = Site::new() else { return };
    for arguments in ["--compute gpu", "--compute auto --gpus 2", "--role server --compute gpu"] {
        let output = site.output(arguments).await;
        let complaints = String::from_utf8_lossy(&output.stderr);
        let said = complaints.contains("built without the feature cuda");
        assert!(output.status.code() == Some(2) && said, "{arguments}: {output:?}");
    }
}
