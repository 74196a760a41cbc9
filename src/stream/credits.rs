//! Who may send how many more messages. A credit is a place: a receive that is posted over there and that nothing else uses.
//!
//! Each side's slots are at any time one of: lent (the peer may use it, or has used it and the message was not taken yet),
//! held (a message in it is not read yet) or owed (free again, and the peer not told). Telling costs a message, so it waits
//! until half of the slots are owed, or until there is a message that goes there anyway.
//!
//! A message of credits alone thus carries at least half of them, and as there are no more than all of them on their way,
//! the peer never has more than two such messages before it: [`CONTROL_SLOTS`] are enough, and no credit is needed to give credits.

/// Receives beyond those for data: two messages of credits, the end and hello.
pub(super) const CONTROL_SLOTS: u32 = 4;

#[derive(Debug)]
pub(super) struct Credits {
    /// This side's slots for data.
    slots: u32,
    lent: u32,
    owed: u32,
    /// Data messages that this side may send.
    available: u32,
    /// The peer's slots for data; 0 until it has said hello.
    peer_slots: u32,
}

impl Credits {
    pub(super) fn new(slots: u32) -> Self {
        Self { slots, lent: slots, owed: 0, available: 0, peer_slots: 0 }
    }

    /// The peer has said how many slots it has.
    pub(super) fn meet(&mut self, peer_slots: u32) {
        (self.peer_slots, self.available) = (peer_slots, peer_slots);
    }

    pub(super) fn available(&self) -> u32 {
        self.available
    }

    /// Data messages that the peer may still send, or has sent and nobody took.
    pub(super) fn lent(&self) -> u32 {
        self.lent
    }

    /// One was sent.
    pub(super) fn spend(&mut self) {
        self.available -= 1;
    }

    /// Credits came. `Err` when they are more than the peer can have.
    pub(super) fn gain(&mut self, credits: u32) -> Result<(), &'static str> {
        let total = self.available.checked_add(credits).filter(|total| *total <= self.peer_slots);
        self.available = total.ok_or("more credits than the peer has slots")?;
        Ok(())
    }

    /// A data message was taken: its slot is held. `Err` when the peer had no credit for it.
    pub(super) fn hold(&mut self) -> Result<(), &'static str> {
        self.lent = self.lent.checked_sub(1).ok_or("data without a credit for it")?;
        Ok(())
    }

    /// A slot that was held has been posted again.
    pub(super) fn release(&mut self) {
        self.owed += 1;
    }

    /// Whether credits are worth a message of their own.
    pub(super) fn due(&self) -> bool {
        self.owed >= self.slots.div_ceil(2)
    }

    /// All that is owed, to go with a message.
    pub(super) fn lend(&mut self) -> u32 {
        self.lent += self.owed;
        std::mem::take(&mut self.owed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// What is on its way: data, or credits alone, each with the credits it carries.
    #[derive(Clone, Copy)]
    struct Message {
        data: bool,
        credits: u32,
    }

    #[derive(Debug)]
    struct Side {
        credits: Credits,
        held: u32,
    }

    /// One step of a side: `0` sends data if it may, `1` reads, `2` takes a message.
    fn step(action: u8, me: &mut Side, out: &mut VecDeque<Message>, inward: &mut VecDeque<Message>) {
        match action {
            0 if me.credits.available() > 0 => {
                me.credits.spend();
                out.push_back(Message { data: true, credits: me.credits.lend() });
            }
            1 if me.held > 0 => {
                me.held -= 1;
                me.credits.release();
                if me.credits.due() {
                    out.push_back(Message { data: false, credits: me.credits.lend() });
                }
            }
            2 => {
                if let Some(message) = inward.pop_front() {
                    me.credits.gain(message.credits).unwrap();
                    if message.data {
                        me.credits.hold().unwrap();
                        me.held += 1;
                    }
                }
            }
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn no_message_lacks_a_slot_and_nobody_starves(
            slots in [1u32..6, 1u32..6],
            steps in proptest::collection::vec((0usize..2, 0u8..3), 1..400),
        ) {
            let mut sides = slots.map(|slots| Side { credits: Credits::new(slots), held: 0 });
            sides[0].credits.meet(slots[1]);
            sides[1].credits.meet(slots[0]);
            let mut ways = [VecDeque::new(), VecDeque::new()];
            for (who, action) in steps {
                let [to_one, to_zero] = &mut ways;
                let (out, inward) = if who == 0 { (to_one, to_zero) } else { (to_zero, to_one) };
                step(action, &mut sides[who], out, inward);
                for (way, receiver) in ways.iter().zip([1, 0]) {
                    let data = way.iter().filter(|message| message.data).count() as u32;
                    prop_assert!(data + sides[receiver].held <= slots[receiver]);
                    prop_assert!(way.len() as u32 - data <= 2, "messages of credits alone");
                }
            }
            // Whoever takes and reads all there is leaves the peer with something to send.
            for _ in 0..1000 {
                let ([to_one, to_zero], [zero, one]) = (&mut ways, &mut sides);
                for action in [2, 1] {
                    step(action, zero, to_one, to_zero);
                    step(action, one, to_zero, to_one);
                }
            }
            prop_assert!(sides.iter().all(|side| side.credits.available() > 0), "{sides:?}");
        }
    }

    #[test]
    fn what_a_peer_may_not_send_is_refused() {
        let mut credits = Credits::new(1);
        assert!(credits.gain(1).is_err());
        credits.meet(2);
        assert!(credits.gain(1).is_err());
        assert!(credits.gain(u32::MAX).is_err());
        credits.hold().unwrap();
        assert!(credits.hold().is_err());
    }
}
