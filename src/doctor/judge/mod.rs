//! One function per link: what the files and the drivers say, judged.

pub(super) mod gpu;
pub(super) mod machine;
pub(super) mod nic;
pub(super) mod path;
