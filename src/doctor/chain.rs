//! The chain of links, and when it holds.

use super::finding::{Finding, Link, Need, Route, Status};

/// All links between a NIC and a GPU.
///
/// One link that is broken breaks the chain, and so does one that it needs and about which nothing could be told. Of the
/// [routes](Route) one is enough: the links of the other then count for nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Chain {
    /// The GPU, by the name that the report gives it (`GPU0`).
    pub gpu: Option<String>,
    /// The RDMA device, by its own name (`mlx5_0`).
    pub nic: Option<String>,
    /// The links, in order. Without a GPU, or without a NIC, those that are about it are left out, but for the one that says so.
    pub findings: Vec<Finding>,
}

impl Chain {
    /// Whether nothing stands between the NIC and the GPU's memory.
    pub fn holds(&self) -> bool {
        !self.routes().is_empty() && self.faults().next().is_none()
    }

    /// The links because of which it does not hold, in order.
    pub fn faults(&self) -> impl Iterator<Item = &Finding> {
        let routed = !self.routes().is_empty();
        self.findings.iter().filter(move |finding| match (finding.link.need(), finding.status) {
            (_, Status::Ok) => false,
            (Need::Route(_), _) => !routed,
            (_, Status::Broken) => true,
            (Need::Known, Status::Unknown) => false,
            (Need::Always, Status::Unknown) => true,
        })
    }

    /// The ways of registering the GPU's memory that hold.
    pub fn routes(&self) -> Vec<Route> {
        Route::ALL.into_iter().filter(|route| self.has(*route)).collect()
    }

    /// What was found at a link; `None` where it was left out.
    pub fn finding(&self, link: Link) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.link == link)
    }

    fn has(&self, route: Route) -> bool {
        let mut links = Link::ALL.iter().filter(|link| link.need() == Need::Route(route));
        links.all(|link| self.finding(*link).is_some_and(|finding| finding.status == Status::Ok))
    }

    /// In one sentence whether it holds, and why not.
    pub fn verdict(&self) -> String {
        if self.holds() {
            let routes: Vec<_> = self.routes().iter().map(ToString::to_string).collect();
            return format!("the chain holds, by {}", routes.join(" or "));
        }
        let named = |status| {
            let names: Vec<_> = self.faults().filter(|it| it.status == status).map(|it| it.link.name()).collect();
            if names.is_empty() { String::new() } else { format!("; {status}: {}", names.join(", ")) }
        };
        format!("the chain does not hold{}{}", named(Status::Broken), named(Status::Unknown))
    }

    /// The broken links but for those of routes, which an error lists by itself: a line each.
    #[cfg(feature = "cuda")]
    pub(crate) fn brief(&self) -> String {
        let broken =
            self.faults().filter(|it| it.status == Status::Broken && !matches!(it.link.need(), Need::Route(_)));
        broken.map(|it| format!("\n  {}: {}", it.link, it.value)).collect()
    }
}
