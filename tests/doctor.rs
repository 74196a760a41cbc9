//! The doctor, as its user starts it; and its JSON beside what serializing the report gives.

#[path = "common/example.rs"]
mod example;

#[path = "../examples/doctor/dump/mod.rs"]
#[allow(dead_code)]
mod dump;
#[path = "../examples/doctor/json.rs"]
#[allow(dead_code)]
mod json;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A GPU and a NIC below one switch, another NIC at another CPU.
const DUMP: &str = r#"<system version="1">
  <cpu numaid="0" affinity="0000000f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:19:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"/>
      </pci>
      <pci busid="0000:1a:00.0" class="0x020700" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="000000f0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:9a:00.0" class="0x020700" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe" link_width="16">
      <nic><net name="mlx5_1" dev="1" speed="400000" port="1" gdr="1"/></nic>
    </pci>
  </cpu>
</system>
"#;

fn doctor() -> Option<Command> {
    let mut command = Command::new(example::build("doctor")?);
    command.env_remove("TOKIO_RDMA_TOPOLOGY");
    Some(command)
}

/// Its standard output; it ends with this status, and complains as little as it should.
#[track_caller]
fn said(output: &Output, status: i32) -> String {
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{said}{complained}");
    assert_eq!(complained.is_empty(), status != 2, "{complained}");
    assert!(!complained.contains("panicked"), "{complained}");
    said.into_owned()
}

#[track_caller]
fn parsed(output: &Output, status: i32) -> Value {
    serde_json::from_str(&said(output, status)).unwrap()
}

#[track_caller]
fn finding<'a>(whole: &'a Value, link: &str) -> &'a Value {
    let findings = whole["report"]["chain"]["findings"].as_array().unwrap();
    findings.iter().find(|it| it["link"] == link).unwrap_or_else(|| panic!("nothing about {link} in {whole:#}"))
}

/// Why this machine is none without a GPU and a NIC.
fn has_either() -> Option<&'static str> {
    let nics = fs::read_dir("/sys/class/infiniband").into_iter().flatten().count();
    let functions = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let gpus =
        functions.filter(|it| fs::read_to_string(it.path().join("vendor")).is_ok_and(|id| id.trim() == "0x10de"));
    (nics + gpus.count() > 0).then_some("needs a machine with neither a GPU nor an RDMA device")
}

#[test]
fn with_neither_gpu_nor_nic_it_says_so_in_a_screen() {
    if let Some(why) = has_either() {
        return eprintln!("skipped: {why}");
    }
    let Some(mut doctor) = doctor() else { return };
    let text = said(&doctor.output().unwrap(), 1);
    assert!(text.contains("no GPU") && text.contains("no RDMA device"), "{text}");
    assert!(text.contains("the chain does not hold"), "{text}");
    assert!(text.lines().count() <= 50 && text.lines().all(|line| line.len() <= 80), "{text}");
    for line in text.lines().filter(|line| line.starts_with("broken") || line.starts_with("unknown")) {
        let after = &text[text.find(line).unwrap()..];
        assert!(after.contains("        -> "), "{line}: nothing to do is said in {text}");
    }
    let whole = parsed(&doctor.arg("--json").output().unwrap(), 1);
    assert_eq!(whole["holds"], false);
    assert_eq!(finding(&whole, "gpu")["status"], "broken");
    assert_eq!(finding(&whole, "nic")["status"], "broken");
    assert_eq!(whole["report"]["gpus"].as_array().unwrap().len(), 0);
    assert!(whole["faults"].as_array().unwrap().contains(&"gpu".into()));
}

#[test]
fn wrong_calls_end_with_2_and_say_why() {
    let Some(doctor) = doctor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let no_xml = folder.path().join("no.xml");
    fs::write(&no_xml, "<system>").unwrap();
    let no_xml = no_xml.to_str().unwrap();
    for (arguments, words) in [
        (&["--gpu", "99"][..], "no GPU \"99\""),
        (&["--device", "mlx9_9"], "no RDMA device \"mlx9_9\""),
        (&["--sysfs", "/nonexistent"], "/nonexistent"),
        (&["--sysfs", "/proc"], "it takes a copy of /sys"),
        (&["--dump", "/nonexistent"], "/nonexistent"),
        (&["--dump", no_xml], "not XML"),
        (&["--nonsense"], "--nonsense"),
        (&["--svg", "x.svg"], "--probe"),
    ] {
        let output = Command::new(doctor.get_program()).args(arguments).output().unwrap();
        said(&output, 2);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(complained.contains(words), "{arguments:?}: {complained}");
    }
}

#[test]
fn a_dump_is_shown_as_a_matrix() {
    let Some(doctor) = doctor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("topology.xml");
    fs::write(&file, DUMP).unwrap();
    let run = |arguments: &[&str]| Command::new(doctor.get_program()).arg("--dump").arg(&file).args(arguments).output();
    let text = said(&run(&[]).unwrap(), 0);
    let row = text.lines().find(|line| line.starts_with("GPU0")).unwrap();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["GPU0", "X", "PIX", "SYS", "0-3", "0"], "{text}");
    assert!(text.contains("NIC1: mlx5_1 at 0000:9a:00.0") && !text.contains("chain"), "{text}");
    let machine = parsed(&run(&["--json"]).unwrap(), 0);
    assert_eq!(machine["matrix"]["levels"][0][1], "PIX");
}

#[test]
fn nvlinks_of_a_dump_are_in_its_matrix() {
    let Some(doctor) = doctor() else { return };
    let gpu = |bus: &str, nvlinks: &str| {
        format!(
            r#"<pci busid="0000:{bus}:00.0" class="0x030200" vendor="0x10de" device="0x20b2" link_speed="16.0 GT/s PCIe" link_width="16">
              <gpu dev="0" sm="80" rank="0" gdr="1">{nvlinks}</gpu></pci>"#
        )
    };
    let nvlink = |target: &str, count: &str, class: &str| {
        format!(r#"<nvlink target="0000:{target}:00.0" count="{count}" tclass="{class}"/>"#)
    };
    let switches = nvlink("c4", "2", "0x068000") + &nvlink("c5", "10", "0x068000");
    let straight =
        |target| nvlink(target, "3", "0x030200") + &nvlink("ee", "-7", "0x030200") + &nvlink("00", "1", "0x060000");
    let gpus = [
        gpu("10", &switches),
        gpu("11", &switches),
        gpu("12", &straight("13")),
        gpu("13", &straight("12")),
        gpu("14", ""),
    ];
    let cpu = r#"<cpu numaid="0" affinity="0000000f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">"#;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nvlinks.xml");
    fs::write(&file, format!("<system version=\"1\">{cpu}{}</cpu></system>", gpus.concat())).unwrap();
    let mut command = Command::new(doctor.get_program());
    let machine = parsed(&command.arg("--dump").arg(&file).arg("--json").output().unwrap(), 0);
    let level = |row: usize, column: usize| machine["matrix"]["levels"][row][column].as_str().unwrap();
    assert_eq!([level(0, 1), level(1, 0), level(2, 3), level(3, 2)], ["NV12", "NV12", "NV3", "NV3"], "{machine:#}");
    for far in [level(0, 2), level(1, 3), level(0, 4), level(4, 2)] {
        assert_eq!(far, "PHB", "{machine:#}");
    }
    let first = &machine["gpus"][0]["nvlinks"];
    assert_eq!((&first["active"], &first["to_switches"]), (&12.into(), &12.into()));
    assert_eq!(first["sources"][1]["answer"], "10");
    assert!(first["sources"][1]["asked"].as_str().unwrap().contains("0000:c5:00.0"), "{first}");
    assert_eq!(machine["gpus"][4]["nvlinks"]["active"], Value::Null);
}

/// The tree of the dump, as a copy of another machine's `/sys`.
fn sysfs(folder: &Path) -> PathBuf {
    let root = folder.join("sys");
    fs::create_dir(&root).unwrap();
    dump::write(DUMP, &root).unwrap();
    root
}

#[test]
fn files_of_another_machine() {
    let Some(doctor) = doctor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = sysfs(folder.path());
    fs::create_dir_all(folder.path().join("proc/self")).unwrap();
    fs::write(folder.path().join("proc/self/limits"), "Max locked memory  65536  65536  bytes").unwrap();
    let run = |arguments: &[&str]| {
        parsed(
            &Command::new(doctor.get_program())
                .arg("--sysfs")
                .arg(&root)
                .args(arguments)
                .arg("--json")
                .output()
                .unwrap(),
            1,
        )
    };
    let near = run(&["--gpu", "00000000:19:00.0"]);
    assert_eq!(near["report"]["chain"]["nic"], "mlx5_0", "the nearest");
    assert_eq!(finding(&near, "level")["status"], "ok");
    assert_eq!(finding(&near, "memlock")["value"], "soft 64 KiB, hard 64 KiB");
    assert_eq!(finding(&near, "cuda_driver")["status"], "unknown");
    let far = run(&["--gpu", "0", "--device", "mlx5_1"]);
    assert_eq!(finding(&far, "level")["status"], "broken");
    assert!(finding(&far, "level")["value"].as_str().unwrap().starts_with("SYS"));
}

#[test]
fn a_probe_measures_and_draws() {
    let Some(mut doctor) = doctor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("doctor.svg");
    let output = doctor.args(["--probe", "--json", "--svg"]).arg(&picture).output().unwrap();
    let whole = parsed(&output, output.status.code().unwrap().min(1));
    let all = |list: &str| whole["probe"][list].as_array().unwrap().clone();
    let (registrations, paths) = (all("registrations"), all("paths"));
    assert!(registrations.iter().any(|it| it["device"] == "soft0" && it["bytes"] == 4096), "{registrations:?}");
    assert!(registrations.iter().all(|it| it["median_us"].as_f64().unwrap() > 0.0));
    for by in ["tcp", "unix", "shm"] {
        let path = paths.iter().find(|it| it["device"] == "soft0" && it["by"] == by && it["memory"] == "host");
        let points = path.unwrap_or_else(|| panic!("no {by}: {whole:#}"))["points"].as_array().unwrap();
        assert_eq!(points.len(), 5);
        for point in points {
            let (latency, speed) =
                (point["median_us"].as_f64().unwrap(), point["megabytes_per_second"].as_f64().unwrap());
            assert!(latency > 0.0 && latency < 1e6 && speed > 0.0, "{point}");
        }
    }
    let drawn = fs::read_to_string(&picture).unwrap();
    let document = roxmltree::Document::parse(&drawn).unwrap();
    assert!(document.root_element().has_tag_name("svg"));
    let lines = document.descendants().filter(|it| it.tag_name().name() == "polyline").count();
    assert!(lines >= 5, "{lines} lines");
    let missing =
        ["registering memory", "messages within the process"].into_iter().find(|title| !drawn.contains(title));
    assert_eq!(missing, None);
}

#[cfg(feature = "serde")]
#[test]
fn its_json_is_what_serializing_gives() {
    use tokio_rdma::doctor::{GpuDirectReport, Link};

    let folder = tempfile::tempdir().unwrap();
    let root = sysfs(folder.path());
    let here = GpuDirectReport::builder().without_allocating().build().unwrap();
    let there = GpuDirectReport::builder().files(&root, folder.path().join("proc")).build().unwrap();
    assert!(!there.gpus.is_empty() && !there.nics.is_empty());
    for report in [here, there] {
        let serialized = serde_json::to_value(&report).unwrap();
        assert_eq!(json::report(&report), serialized);
        assert_eq!(serde_json::from_value::<GpuDirectReport>(serialized).unwrap(), report);
    }
    for link in Link::ALL {
        assert_eq!(serde_json::to_value(link).unwrap(), link.name());
    }
}

#[cfg(feature = "cuda")]
mod with_a_driver {
    use super::*;

    /// Of the stand-in for NVIDIA's driver, with these knobs.
    fn asked(doctor: &Command, knobs: &[(&str, &str)]) -> Value {
        let driver = fake_cuda::directory(&[]).unwrap();
        let mut command = Command::new(doctor.get_program());
        command.env("LD_LIBRARY_PATH", driver.path()).arg("--json");
        // Of a GPU that sysfs does not show, so that the way is not known.
        parsed(&command.envs(knobs.iter().copied()).output().unwrap(), 1)
    }

    #[test]
    fn what_cuda_says_is_found() {
        let Some(doctor) = doctor() else { return };
        let whole = asked(&doctor, &[]);
        let value = |link: &str| finding(&whole, link)["value"].as_str().unwrap().to_owned();
        for link in ["gpu", "cuda_driver", "memory_kind", "mapped_memory", "visibility", "dma_buf_export", "gpu_direct"]
        {
            assert_eq!(finding(&whole, link)["status"], "ok", "{link}: {}", value(link));
        }
        assert!(value("cuda_driver").contains("CUDA 13.0"), "{}", value("cuda_driver"));
        assert!(value("memory_kind").contains("gpuDirectRDMACapable"), "{}", value("memory_kind"));
        assert!(value("memory_kind").contains("stream-ordered pool"), "{}", value("memory_kind"));
        assert_eq!(whole["report"]["gpus"][0]["memory_bytes"], 8u64 << 30);
        assert_eq!(whole["report"]["machine"]["cuda"], "13.0");
        let source = &finding(&whole, "dma_buf_export")["sources"][0];
        assert_eq!(source["asked"], "cuDeviceGetAttribute(DMA_BUF_SUPPORTED = 124)");
        assert_eq!(source["answer"], "1");
    }

    /// Between the first two of the report's GPUs, both ways; and the NVLinks of the first.
    #[track_caller]
    fn joined(whole: &Value) -> (String, Value) {
        let levels = &whole["report"]["matrix"]["levels"];
        assert_eq!(levels[0][1], levels[1][0], "{levels}");
        (levels[0][1].as_str().unwrap().to_owned(), whole["report"]["gpus"][0]["nvlinks"].clone())
    }

    #[test]
    fn nvlinks_are_counted_to_switches_and_straight() {
        let Some(doctor) = doctor() else { return };
        for (knobs, cell, active) in [
            (&[("FAKE_CUDA_NVLINKS", "18")][..], "NV18", 18),
            (&[("FAKE_CUDA_NVLINKS", "18,12")], "NV12", 18),
            (&[("FAKE_CUDA_NVLINKS", "4"), ("FAKE_CUDA_NVLINK_KIND", "0")], "NV4", 4),
            (&[("FAKE_CUDA_NVLINKS", "4,0"), ("FAKE_CUDA_NVLINK_KIND", "0")], "unknown", 4),
            (&[("FAKE_CUDA_NVLINKS", "18"), ("FAKE_CUDA_NVLINK_STATE", "0")], "unknown", 0),
            (&[], "unknown", 0),
        ] {
            let (found, nvlinks) = joined(&asked(&doctor, knobs));
            assert_eq!((found.as_str(), &nvlinks["active"]), (cell, &active.into()), "{knobs:?}: {nvlinks:#}");
        }
        let driver = fake_cuda::directory(&[]).unwrap();
        let mut command = Command::new(doctor.get_program());
        command.env("LD_LIBRARY_PATH", driver.path()).env("FAKE_CUDA_NVLINKS", "18");
        let text = said(&command.output().unwrap(), 1);
        let row: Vec<_> = text.lines().find(|line| line.starts_with("GPU0")).unwrap().split_whitespace().collect();
        assert_eq!(row[..3], ["GPU0", "X", "NV18"], "{text}");
        assert!(text.contains("NV# joined by # NVLinks") && text.contains(", NVLinks: 18\n"), "{text}");
        assert!(!text.contains("cannot be told"), "{text}");
    }

    #[test]
    fn absurd_nvlinks_are_none() {
        let Some(doctor) = doctor() else { return };
        let up = ("FAKE_CUDA_NVLINKS", "3");
        let long = "0".repeat(100);
        for (knobs, active) in [
            (&[up, ("FAKE_CUDA_NVLINK_STATE", "4294967295")][..], Value::Null),
            (&[up, ("FAKE_CUDA_NVLINK_STATUS", "999")], Value::Null),
            (&[up, ("FAKE_CUDA_NVLINK_STATUS", "4294967295")], Value::Null),
            (&[up, ("FAKE_CUDA_NVML_STATUS", "9")], Value::Null),
            (&[up, ("FAKE_CUDA_NVLINK_KIND", "4294967295")], 3.into()),
            (&[up, ("FAKE_CUDA_NVLINK_KIND", "0"), ("FAKE_CUDA_NVLINK_ENDS", "")], 3.into()),
            (&[up, ("FAKE_CUDA_NVLINK_KIND", "0"), ("FAKE_CUDA_NVLINK_ENDS", "0000:ee:00.0")], 3.into()),
            (&[up, ("FAKE_CUDA_NVLINK_KIND", "0"), ("FAKE_CUDA_NVLINK_ENDS", &long)], 3.into()),
        ] {
            let (found, nvlinks) = joined(&asked(&doctor, knobs));
            assert_eq!((found.as_str(), &nvlinks["active"]), ("unknown", &active), "{knobs:?}: {nvlinks:#}");
            assert!(!nvlinks["sources"].as_array().unwrap().is_empty(), "{knobs:?}");
        }
    }

    #[test]
    fn without_the_library_or_a_function_of_it_nvlinks_cannot_be_told() {
        let Some(doctor) = doctor() else { return };
        let ask = |driver: &Path, arguments: &[&str]| {
            let mut command = Command::new(doctor.get_program());
            command.env("LD_LIBRARY_PATH", driver).env("FAKE_CUDA_NVLINKS", "4").env("FAKE_CUDA_NVLINK_KIND", "0");
            command.args(arguments).output().unwrap()
        };
        let (needed, optional) = ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemoteDeviceType");
        let older = fake_cuda::directory(&[optional]).unwrap();
        let (cell, nvlinks) = joined(&parsed(&ask(older.path(), &["--json"]), 1));
        assert_eq!(cell, "NV4", "addresses tell of GPUs: {nvlinks:#}");

        let oldest = fake_cuda::directory(&[needed]).unwrap();
        let (cell, nvlinks) = joined(&parsed(&ask(oldest.path(), &["--json"]), 1));
        assert_eq!((cell.as_str(), &nvlinks["active"]), ("unknown", &Value::Null));
        assert!(nvlinks["sources"][0]["answer"].as_str().unwrap().contains(needed), "{nvlinks:#}");

        // A file that is no library, so that none of this machine's own is found.
        let without = fake_cuda::directory(&[]).unwrap();
        let library = without.path().join(fake_cuda::MANAGEMENT);
        fs::remove_file(&library).unwrap();
        fs::write(&library, "no library").unwrap();
        let (cell, nvlinks) = joined(&parsed(&ask(without.path(), &["--json"]), 1));
        assert_eq!((cell.as_str(), &nvlinks["active"]), ("unknown", &Value::Null));
        assert_eq!(nvlinks["sources"][0]["asked"], fake_cuda::MANAGEMENT);
        assert!(nvlinks["sources"][0]["answer"].as_str().unwrap().contains("cannot be loaded"), "{nvlinks:#}");
        let text = said(&ask(without.path(), &[]), 1);
        assert!(text.contains("NVLinks cannot be told: libnvidia-ml.so.1"), "{text}");
    }

    #[test]
    fn visibility_follows_the_attributes() {
        let Some(doctor) = doctor() else { return };
        for (ordering, flush, c2c, status, words) in [
            ("0", "1", "0", "ok", "cuFlushGPUDirectRDMAWrites after each completion"),
            ("0", "0", "0", "broken", "an RDMA Read would have to flush"),
            ("100", "1", "0", "ok", "native"),
            ("200", "1", "0", "ok", "native"),
            ("200", "1", "1", "broken", "coherent link"),
        ] {
            let knobs =
                [("FAKE_CUDA_WRITES_ORDERING", ordering), ("FAKE_CUDA_FLUSH_OPTIONS", flush), ("FAKE_CUDA_C2C", c2c)];
            let whole = asked(&doctor, &knobs);
            let found = finding(&whole, "visibility");
            assert_eq!(found["status"], status, "{knobs:?}: {found}");
            assert!(found["value"].as_str().unwrap().contains(words), "{knobs:?}: {found}");
            assert_eq!(found["sources"][0]["answer"], ordering);
            assert_eq!(found["advice"].as_str().unwrap().is_empty(), status == "ok");
        }
    }

    #[test]
    fn what_a_gpu_lacks_is_broken() {
        let Some(doctor) = doctor() else { return };
        let whole = asked(&doctor, &[("FAKE_CUDA_DMABUF", "0"), ("FAKE_CUDA_GDR", "0")]);
        for link in ["dma_buf_export", "gpu_direct"] {
            assert_eq!(finding(&whole, link)["status"], "broken");
            assert!(whole["faults"].as_array().unwrap().contains(&link.into()));
        }
        let older = fake_cuda::directory(&["cuMemcpyHtoDAsync_v2"]).unwrap();
        let mut command = Command::new(doctor.get_program());
        let whole = parsed(&command.env("LD_LIBRARY_PATH", older.path()).arg("--json").output().unwrap(), 1);
        let found = finding(&whole, "cuda_driver");
        assert_eq!(found["status"], "broken");
        assert!(found["sources"][0]["answer"].as_str().unwrap().contains("cuMemcpyHtoDAsync_v2"), "{found}");
    }
}
