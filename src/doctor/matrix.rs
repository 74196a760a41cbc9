//! Levels of all pairs, and NVLinks between GPUs, as `nvidia-smi topo --matrix` shows them.

use std::fmt;

use super::report::{Gpu, Nic};

/// Levels between GPUs and NICs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Matrix {
    /// The names of rows and columns: `GPU0`, `NIC0`.
    pub names: Vec<String>,
    /// Row by row: the PCIe level, `X` where a device meets itself, and between GPUs that # NVLinks join `NV#`, as in `NV18`. Where the
    /// [override file](crate::topology#override-file) has a level for two GPUs, that one.
    pub levels: Vec<Vec<String>>,
}

impl Matrix {
    pub(super) fn new(gpus: &[Gpu], nics: &[Nic], level: impl Fn(usize, usize) -> String) -> Self {
        let names: Vec<_> = gpus.iter().map(|gpu| &gpu.name).chain(nics.iter().map(|nic| &nic.name)).cloned().collect();
        let cell = |row, column| if row == column { "X".to_owned() } else { level(row, column) };
        let levels = (0..names.len()).map(|row| (0..names.len()).map(|column| cell(row, column)).collect()).collect();
        Self { names, levels }
    }
}

/// The matrix with the columns of CPUs and NUMA nodes.
pub(super) struct Shown<'a> {
    pub matrix: &'a Matrix,
    pub gpus: &'a [Gpu],
    pub nics: &'a [Nic],
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Matrix { names, levels } = self.matrix;
        let place = |cpus: &Option<String>, node: Option<u32>| {
            [cpus.clone().unwrap_or_default(), node.map_or_else(|| "N/A".to_owned(), |node| node.to_string())]
        };
        let gpus = self.gpus.iter().map(|gpu| place(&gpu.cpu_affinity, gpu.numa_node));
        let nics = self.nics.iter().map(|nic| place(&nic.cpu_affinity, nic.numa_node));
        let places: Vec<_> = gpus.chain(nics).collect();
        let affinity = places.iter().map(|place| place[0].len()).max().unwrap_or(0).max("CPU Affinity".len());
        let widest = names.iter().map(String::len).max().unwrap_or(0).max("unknown".len());

        write!(f, "{:<6}", "")?;
        names.iter().try_for_each(|name| write!(f, " {name:<widest$}"))?;
        writeln!(f, " {:<affinity$} NUMA Affinity", "CPU Affinity")?;
        for (name, (row, [cpus, node])) in names.iter().zip(levels.iter().zip(&places)) {
            write!(f, "{name:<6}")?;
            for level in row {
                let level = if level == "X" { " X" } else { level };
                write!(f, " {level:<widest$}")?;
            }
            writeln!(f, " {cpus:<affinity$} {node}")?;
        }
        Ok(())
    }
}

/// What the words of the matrix mean.
pub(super) const LEGEND: &str = "\
X itself; NV# joined by # NVLinks; PIX below one PCIe switch; PXB several
switches, one root port; PHB through the CPU's root complex; NODE between root
complexes of one NUMA node; SYS between NUMA nodes; unknown: sysfs does not say
";
