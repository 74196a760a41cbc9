//! When a chain holds.

use proptest::prelude::*;

use crate::doctor::{Chain, Finding, Link, Route, Status};

fn chain(statuses: &[Status]) -> Chain {
    let finding = |(link, status): (&Link, &Status)| Finding {
        link: *link,
        status: *status,
        value: "value".into(),
        sources: Vec::new(),
        advice: "advice".into(),
    };
    Chain { gpu: None, nic: None, findings: Link::ALL.iter().zip(statuses).map(finding).collect() }
}

fn with(changes: &[(Link, Status)]) -> Chain {
    let mut statuses = vec![Status::Ok; Link::ALL.len()];
    for (link, status) in changes {
        statuses[Link::ALL.iter().position(|it| it == link).unwrap()] = *status;
    }
    chain(&statuses)
}

#[test]
fn one_route_is_enough() {
    use Status::{Broken, Unknown};
    assert_eq!(with(&[]).routes(), [Route::DmaBuf, Route::PeerMemory]);
    for broken in [Link::DmaBufExport, Link::DmaBufImport] {
        let chain = with(&[(broken, Broken)]);
        assert!(chain.holds() && chain.routes() == [Route::PeerMemory], "{}", chain.verdict());
        let chain = with(&[(broken, Broken), (Link::PeerMemory, Broken)]);
        assert!(!chain.holds() && chain.routes().is_empty());
        let named: Vec<_> = chain.faults().map(|it| it.link).collect();
        assert_eq!(named, [broken, Link::PeerMemory]);
        assert!(chain.verdict().contains("dma_buf_") && chain.verdict().contains("peer_memory"));
        assert!(!with(&[(broken, Unknown), (Link::GpuDirect, Broken)]).holds());
    }
    assert!(with(&[(Link::PeerMemory, Unknown), (Link::GpuDirect, Unknown)]).holds());
}

#[test]
fn unknown_is_not_ok_but_where_it_tells_of_speed_alone() {
    for &link in Link::ALL {
        let only_of_speed_or_version =
            [Link::KernelModule, Link::MappedMemory, Link::Bar1, Link::Mtu, Link::Ats, Link::Numa, Link::Kernel];
        let of_a_route = [Link::DmaBufExport, Link::DmaBufImport, Link::GpuDirect, Link::PeerMemory];
        let spared = only_of_speed_or_version.contains(&link) || of_a_route.contains(&link);
        assert_eq!(with(&[(link, Status::Unknown)]).holds(), spared, "{link}");
        assert_eq!(with(&[(link, Status::Broken)]).holds(), of_a_route.contains(&link), "{link}");
    }
    assert!(!Chain { gpu: None, nic: None, findings: Vec::new() }.holds(), "nothing was looked at");
    let only_routes =
        Chain { findings: with(&[]).findings.into_iter().filter(|it| it.link == Link::Kernel).collect(), ..chain(&[]) };
    assert!(!only_routes.holds(), "no route was looked at");
}

#[test]
fn names_are_those_of_the_variants_in_snake_case() {
    for link in Link::ALL {
        let mut snake = String::new();
        for letter in format!("{link:?}").chars() {
            if letter.is_uppercase() && !snake.is_empty() {
                snake.push('_');
            }
            snake.extend(letter.to_lowercase());
        }
        assert_eq!(link.name(), snake);
        assert!(link.name().len() < 16, "{link} does not fit its column");
    }
}

proptest! {
    /// Against the rule written down once more, in other words.
    #[test]
    fn it_holds_exactly_when_no_link_it_needs_is_broken_or_unknown(
        statuses in proptest::collection::vec(prop_oneof![4 => Just(Status::Ok), 1 => Just(Status::Broken), 1 => Just(Status::Unknown)], Link::ALL.len())
    ) {
        let chain = chain(&statuses);
        let of = |link: Link| chain.finding(link).unwrap().status;
        let by_dma_buf = of(Link::DmaBufExport) == Status::Ok && of(Link::DmaBufImport) == Status::Ok;
        let by_module = of(Link::GpuDirect) == Status::Ok && of(Link::PeerMemory) == Status::Ok;
        let common = Link::ALL.iter().all(|&link| match link {
            Link::DmaBufExport | Link::DmaBufImport | Link::GpuDirect | Link::PeerMemory => true,
            Link::KernelModule | Link::MappedMemory | Link::Bar1 | Link::Mtu | Link::Ats | Link::Numa | Link::Kernel => of(link) != Status::Broken,
            _ => of(link) == Status::Ok,
        });
        prop_assert_eq!(chain.holds(), common && (by_dma_buf || by_module));
        prop_assert_eq!(chain.holds(), chain.verdict().contains("the chain holds"));
        let text = chain.to_string();
        for finding in &chain.findings {
            // Nothing that is unknown is shown as ok.
            let line = format!("{:<8}{}", finding.status, finding.link);
            prop_assert!(text.lines().any(|it| it.starts_with(&line)), "{}", text);
        }
    }
}
