//! Requests of this side that the peer has not answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::oneshot;

use super::wire::Response;
use crate::sync::Mutex;

#[derive(Debug)]
pub(super) struct Calls {
    next: AtomicU64,
    /// `None` when the peer will answer nothing any more.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<Response>>>>,
}

/// One request; dropped, nobody waits for its answer any more.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) id: u64,
    answer: oneshot::Receiver<Response>,
    calls: &'a Calls,
}

impl Calls {
    pub(super) fn new() -> Self {
        // Not 0, with which a request's first 16 bytes could all be 0: that is how the other end knows a bare notice.
        Self { next: AtomicU64::new(1), waiting: Mutex::new(Some(HashMap::new())) }
    }

    /// An id that nobody waits for.
    pub(super) fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// `None` after [`close`](Self::close).
    pub(super) fn register(&self) -> Option<Call<'_>> {
        let (sender, answer) = oneshot::channel();
        let id = self.id();
        self.waiting.lock().as_mut()?.insert(id, sender);
        Some(Call { id, answer, calls: self })
    }

    /// Hands the answer to whoever waits for it, or gives it back.
    pub(super) fn complete(&self, id: u64, response: Response) -> Result<(), Response> {
        // Not under the lock: sending wakes.
        let waiting = self.waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id));
        match waiting {
            Some(sender) => sender.send(response),
            None => Err(response),
        }
    }

    /// Everybody who waits is told, and so is everybody who comes later.
    pub(super) fn close(&self) {
        let waiting = self.waiting.lock().take();
        drop(waiting);
    }
}

impl Call<'_> {
    /// The answer; `None` when there will be none.
    pub(super) async fn answer(&mut self) -> Option<Response> {
        (&mut self.answer).await.ok()
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = self.calls.waiting.lock().as_mut() {
            waiting.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: Response = Response::Data { status: 7 };

    #[tokio::test]
    async fn each_answer_reaches_its_request() {
        let calls = Calls::new();
        let (mut first, mut second) = (calls.register().unwrap(), calls.register().unwrap());
        assert_ne!(first.id, second.id);
        calls.complete(second.id, ANSWER).unwrap();
        calls.complete(first.id, Response::Release { status: 1 }).unwrap();
        assert_eq!(first.answer().await, Some(Response::Release { status: 1 }));
        assert_eq!(second.answer().await, Some(ANSWER));
        assert_eq!(calls.complete(second.id, ANSWER), Err(ANSWER), "once");
    }

    #[tokio::test]
    async fn an_answer_that_nobody_waits_for_comes_back() {
        let calls = Calls::new();
        let id = calls.register().unwrap().id;
        assert_eq!(calls.complete(id, ANSWER), Err(ANSWER));
        assert_eq!(calls.complete(u64::MAX, ANSWER), Err(ANSWER));
    }

    #[tokio::test]
    async fn the_end_is_told_to_all() {
        let calls = Calls::new();
        let mut waiting = calls.register().unwrap();
        calls.close();
        assert_eq!(waiting.answer().await, None);
        assert!(calls.register().is_none());
    }
}
