//! The report as a screen of plain text.

use std::fmt;

use super::chain::Chain;
use super::finding::{Finding, Need, Status};
use super::matrix::{LEGEND, Shown};
use super::report::{Gpu, GpuDirectReport};

/// Columns of a terminal.
const WIDTH: usize = 80;
/// Where values begin: after a status and a link's name.
const VALUES: usize = 24;
/// Where sources and advice begin.
const DETAILS: usize = 11;

impl fmt::Display for GpuDirectReport {
    /// The machine, the matrix, and the chain.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.overview())?;
        self.chain.fmt(f)
    }
}

impl GpuDirectReport {
    /// The part of the text that is about the machine: its devices, and the matrix of how near they are to each other.
    pub fn overview(&self) -> impl fmt::Display + '_ {
        Overview(self)
    }
}

struct Overview<'a>(&'a GpuDirectReport);

impl fmt::Display for Overview<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GpuDirectReport { machine, gpus, nics, matrix, .. } = self.0;
        let linux = machine.kernel.as_deref().map(|release| format!(", Linux {release}")).unwrap_or_default();
        writeln!(f, "tokio-rdma {}{linux}\n", machine.crate_version)?;
        if matrix.names.is_empty() {
            return writeln!(f, "no GPU and no RDMA device on this machine");
        }
        writeln!(f, "{}", Shown { matrix, gpus, nics })?;
        for gpu in gpus {
            let model = gpu.model.as_deref().unwrap_or("a GPU of NVIDIA's");
            let nvlinks = gpu.nvlinks.active.filter(|active| *active > 0);
            let nvlinks = nvlinks.map(|active| format!(", NVLinks: {active}")).unwrap_or_default();
            writeln!(f, "{}: {model} at {}{nvlinks}", gpu.name, gpu.pci_address)?;
        }
        for nic in nics {
            let place = nic.pci_address.as_deref().map(|address| format!(" at {address}")).unwrap_or_default();
            let unusable = nic.unusable.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
            writeln!(f, "{}: {}{place}{unusable}", nic.name, nic.device)?;
        }
        if gpus.len() > 1 {
            unknown_nvlinks(f, gpus)?;
        }
        machine.unused_overrides.iter().try_for_each(|line| writeln!(f, "not used: {line}"))?;
        f.write_str(LEGEND)
    }
}

/// Why it is not known whether NVLinks join GPUs, each reason once.
fn unknown_nvlinks(f: &mut fmt::Formatter<'_>, gpus: &[Gpu]) -> fmt::Result {
    let unknown = gpus.iter().filter(|gpu| gpu.nvlinks.active.is_none());
    let mut reasons: Vec<_> = unknown.flat_map(|gpu| gpu.nvlinks.sources.iter().map(ToString::to_string)).collect();
    reasons.sort();
    reasons.dedup();
    paragraph(f, "NVLinks cannot be told: ", 4, &reasons.join("; "))
}

impl fmt::Display for Chain {
    /// Its links and the verdict; of links that are not ok also where that comes from and what to do. With `{:#}`, sources and
    /// remarks of all links.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gpu, nic) = (self.gpu.as_deref().unwrap_or("no GPU"), self.nic.as_deref().unwrap_or("no RDMA device"));
        writeln!(f, "chain between {gpu} and {nic}:")?;
        let mut advised = "";
        for finding in &self.findings {
            let spared = self.is_spared(finding);
            let advice = if finding.advice == advised || spared { "" } else { &finding.advice };
            advised = &finding.advice;
            line(f, finding, advice, spared)?;
        }
        let verdict = self.verdict();
        writeln!(f, "{verdict}")
    }
}

impl Chain {
    /// Whether it does not hold, and need not, since another route does.
    fn is_spared(&self, finding: &Finding) -> bool {
        finding.status != Status::Ok && matches!(finding.link.need(), Need::Route(_)) && !self.routes().is_empty()
    }
}

fn line(f: &mut fmt::Formatter<'_>, finding: &Finding, advice: &str, spared: bool) -> fmt::Result {
    let Finding { link, status, value, sources, .. } = finding;
    let not_needed = if spared { " (not needed: another route holds)" } else { "" };
    paragraph(f, &format!("{status:<8}{link:<16}"), VALUES, &format!("{value}{not_needed}"))?;
    if *status == Status::Ok && !f.alternate() {
        return Ok(());
    }
    let from: Vec<_> = sources.iter().map(ToString::to_string).collect();
    paragraph(f, "        <- ", DETAILS, &from.join("; "))?;
    paragraph(f, "        -> ", DETAILS, advice)
}

/// Wrapped, with `head` in front of the first line and as many spaces before the others. Nothing for no text.
fn paragraph(f: &mut fmt::Formatter<'_>, head: &str, indent: usize, text: &str) -> fmt::Result {
    let mut line = head.to_owned();
    let mut is_new = true;
    for word in text.split_whitespace() {
        if !is_new && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(f, "{line}")?;
            line = " ".repeat(indent);
            is_new = true;
        }
        if !is_new {
            line.push(' ');
        }
        line.push_str(word);
        is_new = false;
    }
    if is_new { Ok(()) } else { writeln!(f, "{line}") }
}
