//! NVLinks, of which NCCL's dumps tell; hwloc's have bandwidths at best, from which no number of links follows.

use roxmltree::Document;
use tokio_rdma::topology::PciAddress;

/// NVLinks of one GPU that lead to one other device.
#[derive(Debug, PartialEq, Eq)]
pub struct NvLink {
    pub gpu: PciAddress,
    /// `None` for a switch.
    pub end: Option<PciAddress>,
    pub count: u32,
    /// The element, for people.
    pub element: String,
}

/// Those of a dump that `super::write` could read. An element that is not understood is none.
pub fn read(document: &Document<'_>) -> Vec<NvLink> {
    document.descendants().filter(|element| element.has_tag_name("nvlink")).filter_map(link).collect()
}

/// Like `<nvlink target="0000:c1:00.0" count="2" tclass="0x068000"/>` in the `<gpu>` of a `<pci>`.
fn link(element: roxmltree::Node<'_, '_>) -> Option<NvLink> {
    const SWITCH: &str = "0x0680";
    const GPU: &str = "0x03";
    let pci = element.ancestors().find(|above| above.has_tag_name("pci"))?;
    let gpu = pci.attribute("busid")?.parse().ok()?;
    let count = element.attribute("count")?.parse().ok()?;
    let (target, class) = (element.attribute("target")?, element.attribute("tclass")?);
    let end = match class {
        _ if class.starts_with(SWITCH) => None,
        _ if class.starts_with(GPU) => Some(target.parse().ok()?),
        // A CPU's, for one.
        _ => return None,
    };
    Some(NvLink {
        gpu,
        end,
        count,
        element: format!("<nvlink target=\"{target}\" tclass=\"{class}\"> of {gpu}, count"),
    })
}
