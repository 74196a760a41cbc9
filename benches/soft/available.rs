//! Which other programs are at hand.

use std::process::{Command, Stdio};

use crate::plan::Peer;
use crate::{iceoryx2, ucx};

pub struct Available {
    ucx: bool,
    iceoryx2: bool,
}

impl Available {
    pub fn look() -> Self {
        Self { ucx: starts(ucx::PROGRAM), iceoryx2: starts(iceoryx2::PROGRAM) }
    }

    /// Why there is no such peer.
    pub fn lacks(&self, peer: Peer) -> Option<&'static str> {
        match peer {
            Peer::Ucx(_) | Peer::UcxAndYield(_) if !self.ucx => {
                Some("ucx_perftest is not installed (Debian: apt-get install ucx-utils)")
            }
            Peer::Iceoryx2 if !self.iceoryx2 => {
                Some("iceoryx2-peer is not there (`cargo xtask bench soft --iceoryx2` builds it)")
            }
            _ => None,
        }
    }
}

fn starts(program: &str) -> bool {
    let mut probe = Command::new(program);
    probe.arg("-h").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok()
}
