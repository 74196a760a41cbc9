//! What a peer may do with exposed memory.

bitflags::bitflags! {
    /// Rights that a key grants to the peer. Empty by default: memory is reachable only from this side.
    ///
    /// The bits are those of `enum ibv_access_flags` in `<infiniband/verbs.h>`; local write access is always granted,
    /// since receives and reads need it.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The peer may write (`IBV_ACCESS_REMOTE_WRITE`).
        const REMOTE_WRITE = 1 << 1;
        /// The peer may read (`IBV_ACCESS_REMOTE_READ`).
        const REMOTE_READ = 1 << 2;
        /// The peer may use atomics (`IBV_ACCESS_REMOTE_ATOMIC`).
        const REMOTE_ATOMIC = 1 << 3;
    }
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        bitflags::parser::to_writer(self, f)
    }
}
