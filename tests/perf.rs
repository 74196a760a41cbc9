//! The example perf, as its user starts it.

#[path = "common/example.rs"]
mod example;

use std::fs;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

/// No run here takes so long, in a debug build on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

fn perf(arguments: &[&str]) -> Option<Output> {
    let mut command = command()?;
    command.args(arguments);
    Some(output(command))
}

/// It is killed when that takes too long.
fn output(mut command: Command) -> Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
        tokio::time::timeout(LIMIT, running).await.unwrap_or_else(|_| panic!("no end within {LIMIT:?}")).unwrap()
    })
}

fn command() -> Option<Command> {
    let mut command = Command::new(example::build("perf")?);
    command.env("TOKIO_RDMA_DEVICE", "soft0").env_remove("TOKIO_RDMA_LINK");
    Some(command)
}

#[test]
fn every_operation_is_measured_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, svg, socket) = (path("perf.json"), path("perf.svg"), format!("unix:{}", path("perf")));
    let count = ["--count", "50", "--warm-up", "0.001", "--depth", "3", "--address", &socket];
    let arguments = [&["--sizes", "1,8..32", "--json", &json, "--svg", &svg][..], &count].concat();
    let Some(output) = perf(&arguments) else { return };
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{complained}");

    let rows: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 6 * 4 + 2);
    for row in rows {
        let figure = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        assert_eq!((figure("count"), figure("depth"), row["link"].as_str()), (50.0, 3.0, Some("shm")), "{row}");
        let times = ["min_us", "p50_us", "p99_us", "p999_us", "max_us"].map(figure);
        assert!(times.is_sorted() && times[0] > 0.0, "{row}");
        assert_eq!((row["ours"].as_f64(), row["unit"].as_str()), (Some(times[1]), Some("us")));
        assert!(figure("operations_per_second") > 0.0, "{row}");
        let name = row["name"].as_str().unwrap().split_once(" shm").unwrap().0;
        let (operation, _) = name.rsplit_once(' ').unwrap().0.rsplit_once(' ').unwrap();
        let shown = said.lines().filter(|line| line.contains(operation) && line.contains("soft0, link shm"));
        assert!(shown.count() >= 1, "{name} is not in the table:\n{said}");
    }
    let drawn = fs::read_to_string(svg).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("write with immediate, shm"), "{drawn:.200}");
}

#[test]
fn what_cannot_be_done_is_said() {
    for (arguments, words) in [
        (&["--memory", "gpu:99"][..], "gpu:99"),
        (&["--device", "mlx9_9"], "no RDMA device named \"mlx9_9\""),
        (&["--sizes", "1G", "--depth", "8"], "the limit is 1073741824; choose fewer with --depth"),
        (&["--sizes", "0"], "out of range"),
        (&["--operation", "teleport"], "teleport"),
        (&["--gpus", "2"], "gpus: 2 were asked for, and the memory is the host's"),
        (&["--gpus", "2", "--memory", "gpu:2"], "gpu:2 is none of the first 2"),
        (&["--gpus", "0"], "--gpus"),
        (&["--gpus", "2", "--role", "server"], "--gpus"),
        (&["--duration", "0", "--warm-up", "0", "--size", "8"], "no operation was made in the time; raise --duration"),
        (&["--role", "client"], "--address"),
        (&["--address", "nowhere"], "nowhere"),
        (&["--role", "server", "--wait", "1"], "no client within 1s"),
    ] {
        let Some(output) = perf(arguments) else { return };
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && complained.contains(words), "{arguments:?}: {complained}");
        assert!(!complained.contains("panicked"), "{arguments:?}: {complained}");
    }
}

/// With the stand-in for the driver, also where there is a real one.
#[cfg(feature = "cuda")]
#[test]
fn memory_of_a_gpu_is_measured() {
    let Some(mut command) = command() else { return };
    let driver = fake_cuda::directory(&[]).unwrap();
    command.args(["--memory", "gpu:0", "--sizes", "8,64K", "--count", "10", "--warm-up", "0", "--depth", "2"]);
    command.env("LD_LIBRARY_PATH", driver.path());
    let output = output(command);
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{complained}");
    assert!(
        said.contains("memory GPU 0")
            && said.contains(", of atomics the host's")
            && said.contains("path software here and GPU 0"),
        "{said}"
    );
    assert_eq!(said.lines().filter(|line| line.contains("soft0, link shm")).count(), 6 * 2 + 2, "{said}");
}

/// The client's bytes on one GPU of the stand-in, the server's on the next.
#[cfg(feature = "cuda")]
#[test]
fn two_gpus_copy_directly_where_their_memory_is_lent() {
    let folder = tempfile::tempdir().unwrap();
    let driver = fake_cuda::directory(&[]).unwrap();
    let json = folder.path().join("perf.json");
    for (link, copied) in [("auto", true), ("sockets", false)] {
        let Some(mut command) = command() else { return };
        command.args([
            "--memory",
            "gpu:1",
            "--gpus",
            "2",
            "--operation",
            "send,write,read,fetch-add",
            "--sizes",
            "64K",
        ]);
        command.args(["--count", "10", "--warm-up", "0"]).arg("--json").arg(&json);
        command.env("LD_LIBRARY_PATH", driver.path()).env("TOKIO_RDMA_LINK", link);
        let output = output(command);
        let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}{complained}");
        let table = |words: &str| said.lines().filter(|line| line.starts_with('|') && line.contains(words)).count();
        let copies = if copied { 2 } else { 0 };
        assert_eq!((table("the GPUs copy"), table("by way of the host")), (copies, 3 - copies), "{said}");

        let rows: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        for row in rows.as_array().unwrap() {
            let (operation, bytes) = (row["operation"].as_str().unwrap(), row["bytes_between_gpus"].as_u64().unwrap());
            if operation == "fetch-add" {
                assert_eq!((&row["gpus_copied"], row["memory"][0].as_str(), bytes), (&Value::Null, Some("host"), 0));
                continue;
            }
            let expected = copied && operation != "send";
            assert_eq!(row["gpus_copied"], expected, "{row}");
            assert_eq!(bytes >= 10 << 16, expected, "{row}");
            assert_eq!(row["link"], if copied { "shm" } else { "tcp" });
            let memory = [0, 1].map(|end| row["memory"][end].as_str().unwrap());
            assert!(memory[0].contains("GPU 1") && memory[1].contains("GPU 0"), "{row}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn fewer_gpus_than_were_asked_for_are_told() {
    let driver = fake_cuda::directory(&[]).unwrap();
    let Some(mut command) = command() else { return };
    command.args(["--memory", "gpu:0", "--gpus", "3"]).env("LD_LIBRARY_PATH", driver.path());
    let output = output(command);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{complained}");
    assert!(complained.contains("gpus: 3 were asked for, and CUDA shows 2 to this process"), "{complained}");
}
