//! The NVLinks of a GPU, and how many bond two GPUs.

use std::collections::BTreeMap;

use super::finding::Source;
use super::nvml::{INVALID_ARGUMENT, NOT_SUPPORTED, NvLinkAnswer, NvLinksAsked, shown};
use super::report::Gpu;
use crate::topology::PciAddress;

/// The NVLinks of a GPU.
///
/// Neither sysfs nor CUDA tells of them. NVIDIA's management library does, `libnvidia-ml.so.1`, which is asked with the feature `cuda`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct NvLinks {
    /// How many are up; `None` where that cannot be told, and `sources` says why.
    pub active: Option<u32>,
    /// How many of them end at NVSwitches, which join all GPUs that they reach.
    pub to_switches: u32,
    /// How many of them lead straight to another GPU, by its PCI address.
    pub to_gpus: BTreeMap<String, u32>,
    /// Where that comes from.
    pub sources: Vec<Source>,
}

impl NvLinks {
    /// Of the GPU at this address; `gpus` are those that the machine is known to have.
    pub(super) fn of(gpu: PciAddress, gpus: &[PciAddress], asked: &NvLinksAsked) -> Self {
        let unknown = |source| Self { sources: vec![source], ..Self::default() };
        let not_asked = |why: &str| unknown(Source::new("libnvidia-ml.so.1", format!("not asked: {why}")));
        match asked {
            NvLinksAsked::Wanted => not_asked("there was no GPU to ask of"),
            NvLinksAsked::NotAsked(why) => not_asked(why),
            NvLinksAsked::NoFeature => not_asked("built without the feature cuda"),
            NvLinksAsked::Failed(source) => unknown(source.clone()),
            NvLinksAsked::Told(told) => match told.get(&gpu) {
                Some(links) => Self::told(links),
                None => not_asked("nothing was told of this GPU"),
            },
            NvLinksAsked::Asked(answers) => match answers.get(&gpu) {
                Some(Ok(links)) => Self::answered(links, gpus),
                Some(Err(source)) => unknown(source.clone()),
                None => not_asked("this GPU was not known"),
            },
        }
    }

    fn told(links: &[(Option<PciAddress>, u32, Source)]) -> Self {
        let mut this = Self { active: Some(0), ..Self::default() };
        for (end, count, source) in links {
            this.active = this.active.map(|active| active.saturating_add(*count));
            let ends = match end {
                Some(gpu) => this.to_gpus.entry(gpu.to_string()).or_default(),
                None => &mut this.to_switches,
            };
            *ends = ends.saturating_add(*count);
            this.sources.push(source.clone());
        }
        this
    }

    fn answered(links: &[NvLinkAnswer], gpus: &[PciAddress]) -> Self {
        let mut this = Self { sources: sources(links), ..Self::default() };
        let mut active = 0;
        for link in links {
            match link.state {
                Ok(NvLinkAnswer::UP) => active += 1,
                Ok(NvLinkAnswer::DOWN) | Err(INVALID_ARGUMENT | NOT_SUPPORTED) => continue,
                // A state or an error that says nothing of the link: then the number is not known.
                Ok(_) | Err(_) => return Self { sources: this.sources, ..Self::default() },
            }
            match end(link, gpus) {
                Some(End::Switch) => this.to_switches += 1,
                Some(End::Gpu(address)) => *this.to_gpus.entry(address.to_string()).or_default() += 1,
                None => {}
            }
        }
        Self { active: Some(active), ..this }
    }
}

enum End {
    Switch,
    Gpu(PciAddress),
}

/// Where a link leads that is up. A virtual machine that has no access to the switches is told their kind, and an address of
/// `FFFFFFFF:FF:FF.0`.
fn end(link: &NvLinkAnswer, gpus: &[PciAddress]) -> Option<End> {
    let address = || link.end.as_ref()?.as_ref().ok()?.parse::<PciAddress>().ok();
    match link.end_kind {
        Some(Ok(NvLinkAnswer::SWITCH)) => Some(End::Switch),
        Some(Ok(NvLinkAnswer::GPU)) => address().map(End::Gpu),
        // Something else, or a kind that is newer than this.
        Some(Ok(_)) => None,
        None | Some(Err(_)) => address().filter(|address| gpus.contains(address)).map(End::Gpu),
    }
}

/// How many NVLinks join two GPUs, as `nvidia-smi` counts: those that lead straight from one to the other, or else those of the GPU
/// that has fewer to switches. `None` for none, or where it cannot be told of one of them.
pub(super) fn bonded(a: &Gpu, b: &Gpu) -> Option<u32> {
    let to = |from: &Gpu, to: &Gpu| from.nvlinks.to_gpus.get(&to.pci_address).copied().unwrap_or(0);
    let direct = to(a, b).min(to(b, a));
    let switched = a.nvlinks.to_switches.min(b.nvlinks.to_switches);
    [direct, switched].into_iter().find(|count| *count > 0)
}

/// What was asked of the links, those with equal answers together.
fn sources(links: &[NvLinkAnswer]) -> Vec<Source> {
    let number = |answer: &Result<u32, u32>| answer.map_or_else(shown, |value| value.to_string());
    let states = links.iter().map(|link| Some(number(&link.state)));
    let ends = links.iter().map(|link| Some(link.end.as_ref()?.clone().unwrap_or_else(shown)));
    let kinds = links.iter().map(|link| {
        link.end.as_ref()?;
        Some(link.end_kind.as_ref().map_or_else(|| "the library has no such function".to_owned(), number))
    });
    let mut sources = grouped("nvmlDeviceGetNvLinkState", states);
    sources.extend(grouped("nvmlDeviceGetNvLinkRemoteDeviceType", kinds));
    sources.extend(grouped("nvmlDeviceGetNvLinkRemotePciInfo_v2", ends));
    sources
}

fn grouped(call: &str, answers: impl Iterator<Item = Option<String>>) -> Vec<Source> {
    let mut groups: Vec<(usize, usize, String)> = Vec::new();
    for (link, answer) in answers.enumerate() {
        let Some(answer) = answer else { continue };
        match groups.last_mut() {
            Some((_, last, known)) if *last + 1 == link && *known == answer => *last = link,
            _ => groups.push((link, link, answer)),
        }
    }
    let source = |(first, last, answer): (usize, usize, String)| {
        let links = if first == last { format!("link {first}") } else { format!("links {first} to {last}") };
        Source::new(format!("{call}({links})"), answer)
    };
    groups.into_iter().map(source).collect()
}
