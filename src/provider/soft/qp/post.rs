//! Posting work requests.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::context::Shared;
use super::super::keys::Device;
use super::QpShared;
use super::queue::total;
use super::tx::Tx;
use crate::error::{CloseReason, WcStatus};
use crate::provider::{PostError, PostErrorKind, ReceiveRequest, SendRequest, Sge, WrOp};

impl QpShared {
    pub(super) fn post_send(self: &Arc<Self>, requests: &[SendRequest]) -> Result<(), PostError> {
        let mut tx = self.tx.lock();
        let mut result = Ok(());
        for (accepted, request) in requests.iter().enumerate() {
            if let Err(kind) = self.enqueue(&mut tx, request) {
                result = Err(PostError { accepted, kind });
                break;
            }
        }
        if !tx.blocked && self.closed.get().is_none() {
            tx.flush(self, false);
        }
        // Only a request that is wrong by itself can be at the front and finished right after posting.
        if tx.front_poison().is_some() {
            self.doomed.store(true, Ordering::SeqCst);
        }
        drop(tx);
        self.cq.want_attention();
        self.check_doom();
        result
    }

    fn enqueue(&self, tx: &mut Tx, request: &SendRequest) -> Result<(), PostErrorKind> {
        if let Some(reason) = self.closed.get() {
            return Err(PostErrorKind::Closed(reason.clone()));
        }
        if request.sges.len() > self.config.max_send_sge as usize {
            return Err(invalid("more scatter/gather entries than the queue pair was made for"));
        }
        let length = total(&request.sges);
        if request.inline && length > u64::from(self.config.max_inline) {
            return Err(invalid("more inline bytes than the queue pair was made for"));
        }
        let covered = covered(&self.ctx, self.pd, &request.sges)?;
        let poison = self.check_request(request, length, covered.is_some());
        let device = covered.flatten();
        if request.inline && device.is_some() {
            return Err(invalid("a device's memory is not copied at posting time"));
        }
        let receive = match request.op {
            WrOp::Send { .. } | WrOp::Write { imm: Some(_), .. } => {
                tx.receives_wanted += 1;
                Some(tx.receives_wanted - 1)
            }
            _ => None,
        };
        let Some(entry) = tx.sq.push() else {
            tx.receives_wanted -= u64::from(receive.is_some());
            return Err(PostErrorKind::Full);
        };
        entry.wr_id = request.wr_id;
        entry.op = request.op;
        entry.sges.clear();
        entry.sges.extend_from_slice(&request.sges);
        entry.device = device;
        entry.length = u32::try_from(length).unwrap_or(u32::MAX);
        entry.signaled = request.signaled;
        entry.poison = poison;
        entry.answered = false;
        entry.received = 0;
        entry.receive = receive;
        Ok(())
    }

    /// The status that a request will fail with on this side.
    fn check_request(&self, request: &SendRequest, length: u64, covered: bool) -> Option<WcStatus> {
        if !covered {
            return Some(WcStatus::LocalProtection);
        }
        let atomic = matches!(request.op, WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. });
        if length > self.agreed.max_message || (atomic && length != 8) {
            return Some(WcStatus::LocalLength);
        }
        let reads = atomic || matches!(request.op, WrOp::Read { .. });
        (reads && self.agreed.reads_started == 0).then_some(WcStatus::LocalQpOperation)
    }

    pub(super) fn post_receive(self: &Arc<Self>, requests: &[ReceiveRequest]) -> Result<(), PostError> {
        let mut result = Ok(());
        let mut posted = 0;
        let mut broken = None;
        let mut rq = self.rq.lock();
        for (accepted, request) in requests.iter().enumerate() {
            let mut covered = None;
            let refusal = if rq.closed {
                Some(PostErrorKind::Closed(self.closed.get().cloned().unwrap_or(CloseReason::Local)))
            } else if request.sges.len() > self.config.max_receive_sge as usize {
                Some(invalid("more scatter/gather entries than the queue pair was made for"))
            } else {
                super::covered(&self.ctx, self.pd, &request.sges).map(|device| covered = device).err()
            };
            let entry = match refusal {
                Some(kind) => Err(kind),
                None => rq.ring.push().ok_or(PostErrorKind::Full),
            };
            let entry = match entry {
                Ok(entry) => entry,
                Err(kind) => {
                    result = Err(PostError { accepted, kind });
                    break;
                }
            };
            entry.wr_id = request.wr_id;
            entry.sges.clear();
            entry.sges.extend_from_slice(&request.sges);
            entry.capacity = total(&request.sges);
            entry.poison = covered.is_none().then_some(WcStatus::LocalProtection);
            entry.device = covered.flatten();
            broken = broken.or(entry.poison);
            posted += 1;
        }
        // Under the lock: the peer must not hear of a receive before it is there.
        self.receives_posted.fetch_add(posted, Ordering::SeqCst);
        drop(rq);
        if let Some(status) = broken {
            self.fail(CloseReason::Failed(status));
        } else if posted > 0 && self.peer_careful.load(Ordering::SeqCst) {
            self.announce_receives();
        }
        result
    }

    /// The peer holds requests back until it hears of receives.
    pub(in super::super) fn announce_receives(self: &Arc<Self>) {
        let mut tx = self.tx.lock();
        if self.closed.get().is_none() {
            tx.flush(self, true);
        }
        drop(tx);
        self.cq.want_attention();
        self.check_doom();
    }
}

/// Whose memory a list names; `None` when a key does not cover its entry.
///
/// A list over the memory of several is refused: each of its keys is good, so no completion's status would tell the truth,
/// and like a list that is too long it is a request that this device does not carry out.
#[inline]
pub(in super::super) fn covered(ctx: &Shared, pd: u64, sges: &[Sge]) -> Result<Option<Device>, PostErrorKind> {
    let (mut host, mut device) = (false, false);
    for sge in sges.iter().filter(|sge| sge.segment.len() > 0) {
        let Some(kind) = ctx.keys.check_local(sge.lkey, pd, &sge.segment) else { return Ok(None) };
        device |= kind;
        host |= !kind;
    }
    if device { device_of(ctx, sges, host) } else { Ok(Some(None)) }
}

#[inline(never)]
fn device_of(ctx: &Shared, sges: &[Sge], host: bool) -> Result<Option<Device>, PostErrorKind> {
    if host {
        return Err(invalid("one list over the memory of the host and of a device"));
    }
    let mut all = None;
    for sge in sges.iter().filter(|sge| sge.segment.len() > 0) {
        let Some(own) = ctx.keys.device(sge.lkey) else { return Ok(None) };
        if all.as_ref().is_some_and(|other| !Arc::ptr_eq(other, &own)) {
            return Err(invalid("one list over the memory of two devices"));
        }
        all = Some(own);
    }
    Ok(Some(all))
}

pub(in super::super) fn invalid(why: &'static str) -> PostErrorKind {
    PostErrorKind::System(io::Error::new(io::ErrorKind::InvalidInput, why))
}
