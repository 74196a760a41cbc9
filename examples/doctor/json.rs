//! The report for programs. Names are stable; with the crate's feature `serde`, `report` is what serializing it gives.

use serde_json::{Value, json};
use tokio_rdma::doctor::{Finding, Gpu, GpuDirectReport, Nic, Route, Source};

/// The report, what follows from it, and what was measured.
pub fn whole(report: &GpuDirectReport, figures: Option<&impl serde::Serialize>) -> Value {
    let chain = &report.chain;
    json!({
        "holds": chain.holds(),
        "verdict": chain.verdict(),
        "faults": chain.faults().map(|fault| fault.link.name()).collect::<Vec<_>>(),
        "routes": chain.routes().into_iter().map(Route::name).collect::<Vec<_>>(),
        "report": self::report(report),
        "probe": figures.map(|figures| serde_json::to_value(figures).unwrap_or_default()),
    })
}

/// The report.
pub fn report(report: &GpuDirectReport) -> Value {
    let chain = &report.chain;
    let mut value = machine(report);
    value["chain"] = json!({
        "gpu": chain.gpu,
        "nic": chain.nic,
        "findings": chain.findings.iter().map(finding).collect::<Vec<_>>(),
    });
    value
}

/// The part of it that is about no chain.
pub fn machine(report: &GpuDirectReport) -> Value {
    let GpuDirectReport { machine, matrix, .. } = report;
    json!({
        "machine": {
            "crate_version": machine.crate_version,
            "has_feature_cuda": machine.has_feature_cuda,
            "kernel": machine.kernel,
            "cuda": machine.cuda,
            "unused_overrides": machine.unused_overrides,
        },
        "gpus": report.gpus.iter().map(gpu).collect::<Vec<_>>(),
        "nics": report.nics.iter().map(nic).collect::<Vec<_>>(),
        "matrix": { "names": matrix.names, "levels": matrix.levels },
    })
}

fn gpu(gpu: &Gpu) -> Value {
    json!({
        "name": gpu.name,
        "pci_address": gpu.pci_address,
        "model": gpu.model,
        "cuda_ordinal": gpu.cuda_ordinal,
        "memory_bytes": gpu.memory_bytes,
        "numa_node": gpu.numa_node,
        "cpu_affinity": gpu.cpu_affinity,
        "nvlinks": {
            "active": gpu.nvlinks.active,
            "to_switches": gpu.nvlinks.to_switches,
            "to_gpus": gpu.nvlinks.to_gpus,
            "sources": sources(&gpu.nvlinks.sources),
        },
    })
}

fn nic(nic: &Nic) -> Value {
    json!({
        "name": nic.name,
        "device": nic.device,
        "pci_address": nic.pci_address,
        "driver": nic.driver,
        "megabits_per_second": nic.megabits_per_second,
        "unusable": nic.unusable,
        "numa_node": nic.numa_node,
        "cpu_affinity": nic.cpu_affinity,
    })
}

fn finding(finding: &Finding) -> Value {
    json!({
        "link": finding.link.name(),
        "status": finding.status.name(),
        "value": finding.value,
        "sources": sources(&finding.sources),
        "advice": finding.advice,
    })
}

fn sources(sources: &[Source]) -> Vec<Value> {
    sources.iter().map(|source| json!({ "asked": source.asked, "answer": source.answer })).collect()
}
