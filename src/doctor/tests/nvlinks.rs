//! NVLinks between the GPUs of made-up machines.

use super::fixture::{Fixture, nvlinks};
use crate::doctor::GpuDirectReport;
use crate::doctor::finding::Source;
use crate::doctor::nvml::{NOT_SUPPORTED, NvLinkAnswer, NvLinksAsked};
use crate::topology::Topology;

const HIDDEN: &str = "FFFFFFFF:FF:FF.0";

/// Between the first two GPUs, both ways; they are alike.
#[track_caller]
fn cell(report: &GpuDirectReport) -> &str {
    let levels = &report.matrix.levels;
    assert_eq!(levels[0][1], levels[1][0], "{report}");
    assert!(levels[0][0] == "X" && levels[1][1] == "X", "{report}");
    &levels[0][1]
}

#[test]
fn switches_join_by_the_smaller_number() {
    let mut machine = Fixture::small();
    let report = machine.report();
    assert_eq!(cell(&report), "NV18");
    assert_eq!(report.matrix.levels[0][2], "NV18", "another NUMA node");
    assert_eq!(report.matrix.levels[0][3], "PIX", "NICs have none");
    assert_eq!((report.gpus[0].nvlinks.active, report.gpus[0].nvlinks.to_switches), (Some(18), 18));
    let sources: Vec<_> = report.gpus[0].nvlinks.sources.iter().map(ToString::to_string).collect();
    assert_eq!(
        sources,
        [
            "nvmlDeviceGetNvLinkState(links 0 to 17): 1",
            "nvmlDeviceGetNvLinkState(link 18): NVML error 2 (INVALID_ARGUMENT)",
            "nvmlDeviceGetNvLinkRemoteDeviceType(links 0 to 17): 2",
            "nvmlDeviceGetNvLinkRemotePciInfo_v2(links 0 to 17): FFFFFFFF:FF:FF.0",
        ]
    );
    // Two of the second GPU's are down.
    let links = machine.nvlinks(1).as_mut().unwrap();
    for link in &mut links[..2] {
        *link = NvLinkAnswer { state: Ok(NvLinkAnswer::DOWN), end: None, end_kind: None };
    }
    let report = machine.report();
    assert_eq!((cell(&report), report.matrix.levels[0][2].as_str()), ("NV16", "NV18"));
}

#[test]
fn direct_links_count_between_their_ends_only() {
    let mut machine = Fixture::small();
    let [first, second] = [0, 1].map(|number| Fixture::gpu_address(number).to_string());
    // As the library writes addresses.
    *machine.nvlinks(0) = Ok(nvlinks(4, NvLinkAnswer::GPU, &format!("0000{second}")));
    *machine.nvlinks(1) = Ok(nvlinks(4, NvLinkAnswer::GPU, &format!("0000{first}")));
    *machine.nvlinks(7) = Ok(Vec::new());
    let report = machine.report();
    assert_eq!(cell(&report), "NV4");
    assert_eq!(report.matrix.levels[0][2], "SYS");
    assert_eq!(report.gpus[0].nvlinks.to_gpus[&second], 4);
    assert_eq!(report.gpus[2].nvlinks.active, Some(0));
    // Where the kind of an end cannot be told, its address can.
    for (kind, why) in [(None, "has no such function"), (Some(Err(13)), "FUNCTION_NOT_FOUND")] {
        let links = machine.nvlinks(0).as_mut().unwrap();
        links.iter_mut().filter(|link| link.end.is_some()).for_each(|link| link.end_kind = kind);
        let report = machine.report();
        assert_eq!(cell(&report), "NV4", "{why}");
        assert!(format!("{:?}", report.gpus[0].nvlinks.sources).contains(why), "{:?}", report.gpus[0].nvlinks);
    }
}

#[test]
fn absurd_answers_leave_the_pcie_level() {
    let up = |end: Option<Result<String, u32>>, end_kind| NvLinkAnswer { state: Ok(NvLinkAnswer::UP), end, end_kind };
    let odd = |state| vec![NvLinkAnswer { state, end: None, end_kind: None }];
    let own = Fixture::gpu_address(0).to_string();
    let unknown = None;
    for (answers, active) in [
        (odd(Ok(u32::MAX)), unknown),
        (odd(Ok(2)), unknown),
        (odd(Err(999)), unknown),
        (odd(Err(u32::MAX)), unknown),
        ([nvlinks(3, NvLinkAnswer::SWITCH, HIDDEN), odd(Err(15))].concat(), unknown),
        (odd(Err(NOT_SUPPORTED)), Some(0)),
        (Vec::new(), Some(0)),
        (nvlinks(2, NvLinkAnswer::GPU, HIDDEN), Some(2)),
        (nvlinks(2, NvLinkAnswer::GPU, "no address"), Some(2)),
        (nvlinks(2, NvLinkAnswer::GPU, &own), Some(2)),
        (nvlinks(2, NvLinkAnswer::GPU, "0000:ee:00.0"), Some(2)),
        (nvlinks(2, 255, HIDDEN), Some(2)),
        (nvlinks(2, u32::MAX, HIDDEN), Some(2)),
        (vec![up(None, None)], Some(1)),
        (vec![up(Some(Err(999)), Some(Err(999)))], Some(1)),
        (vec![up(Some(Ok("0000:ee:00.0".into())), Some(Err(13)))], Some(1)),
    ] {
        let mut machine = Fixture::small();
        *machine.nvlinks(0) = Ok(answers.clone());
        let report = machine.report();
        assert_eq!(cell(&report), "NODE", "{answers:?}");
        assert_eq!(report.gpus[0].nvlinks.active, active, "{answers:?}");
        assert_eq!(report.to_string().contains("NVLinks cannot be told: "), active.is_none(), "{answers:?}");
    }
}

#[test]
fn what_cannot_be_told_says_why_and_shows_the_pcie_level() {
    let mut machine = Fixture::small();
    *machine.nvlinks(1) =
        Err(Source::new("nvmlDeviceGetHandleByPciBusId_v2(0000:13:00.0)", "NVML error 6 (NOT_FOUND)"));
    let report = machine.report();
    assert_eq!((cell(&report), report.matrix.levels[0][2].as_str()), ("NODE", "NV18"));
    assert!(report.to_string().contains("NVLinks cannot be told: nvmlDeviceGetHandleByPciBusId_v2"), "{report}");

    for (asked, why) in [
        (NvLinksAsked::Failed(Source::new("libnvidia-ml.so.1", "cannot be loaded: no such file")), "no such file"),
        (NvLinksAsked::NoFeature, "feature cuda"),
        (NvLinksAsked::NotAsked("the report is of files"), "of files"),
        (NvLinksAsked::Asked([].into()), "not known"),
    ] {
        machine.live.nvlinks = asked;
        let report = machine.report();
        assert_eq!(cell(&report), "NODE");
        for gpu in &report.gpus {
            assert_eq!((gpu.nvlinks.active, gpu.nvlinks.sources.len()), (None, 1));
            assert!(gpu.nvlinks.sources[0].answer.contains(why), "{:?}", gpu.nvlinks);
        }
        let text = report.to_string();
        assert!(text.contains("NVLinks cannot be told: libnvidia-ml.so.1"), "{text}");
        assert_eq!(text.matches("libnvidia-ml.so.1").count(), 1, "each reason once: {text}");
    }
}

#[test]
fn an_override_has_the_last_word() {
    let machine = Fixture::small();
    let [first, second] = [0, 1].map(Fixture::gpu_address);
    machine.write("override", format!("{first} {second} PXB\n"));
    let topology = Topology::read_from(machine.path("sys")).unwrap().with_overrides(machine.path("override")).unwrap();
    let report = machine.report_on(&topology, "0", "mlx5_0").unwrap();
    assert_eq!((cell(&report), report.matrix.levels[0][2].as_str()), ("PXB", "NV18"));
    assert_eq!(report.gpus[0].nvlinks.active, Some(18));
}

#[test]
fn who_makes_the_report_can_tell() {
    let machine = Fixture::small();
    let [first, second, third] = [0, 1, 7].map(Fixture::gpu_address);
    let report = GpuDirectReport::builder()
        .files(machine.path("sys"), machine.path("proc"))
        .nvlinks(first, Some(second), 3, "a file")
        .nvlinks(second, Some(first), 2, "a file")
        .nvlinks(second, Some(first), u32::MAX, "a file")
        .nvlinks(first, None, 12, "a file")
        .nvlinks(third, None, 6, "a file")
        .build()
        .unwrap();
    assert_eq!((cell(&report), report.matrix.levels[0][2].as_str()), ("NV3", "NV6"));
    assert_eq!(report.matrix.levels[1][2], "SYS");
    assert_eq!(report.gpus[1].nvlinks.active, Some(u32::MAX));
    assert_eq!(report.gpus[0].nvlinks.sources[0].to_string(), "a file: 3");
}
