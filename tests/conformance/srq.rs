//! Shared receive queues: many connections, one queue of receives.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use tokio::join;
use tokio_rdma::messages::Message;
use tokio_rdma::op::SharedReceiveOp;
use tokio_rdma::{
    Buffer, CloseReason, Connection, ConnectionBuilder, ConnectionId, Error, Listener, ProtectionDomain, SgList,
    SharedReceiveQueue, WcStatus,
};

use crate::buffers::too_long;
use crate::common::rig::{contents, usual};
use crate::common::run::SOON;
use crate::common::{End, Rig, assert_pattern, eventually, exercise, fill, holds_for, poll_once, within};

core_cases!(requests_are_answered_on_the_connection_they_came_by);
cases!(
    receives_are_taken_in_the_order_of_posting,
    three_connections_share_two_receives,
    without_receives_peers_wait_their_turn,
    a_peer_that_may_not_wait_is_told,
    a_connection_that_ends_leaves_the_others_their_receives,
    connections_that_end_all_the_time,
    a_message_that_is_too_long_ends_its_connection_alone,
    connections_keep_the_queue,
    the_queue_keeps_no_connection,
    a_listener_keeps_the_queue,
    a_dropped_receive_keeps_its_buffer_until_a_message_came,
    a_dropped_receiver_leaves_its_receives,
    two_receivers_take_turns,
    receives_wait_for_a_place,
    a_receive_has_a_deadline,
    sixty_four_connections_and_one_stream,
    everything_that_uses_up_a_receive,
    lists_are_received_into,
    a_message_may_come_before_its_connection,
    a_client_of_many_servers,
    completion_queues_share_the_receives,
    the_connection_itself_has_no_receives,
    what_does_not_fit_is_refused,
    an_endpoint_needs_a_receive_of_its_own_on_a_nic,
);

/// A server whose connections share their receives, and its clients.
struct Service {
    domain: ProtectionDomain,
    srq: SharedReceiveQueue,
    listener: Listener,
    clients: Vec<End>,
    /// The other ends, in the same order.
    servers: Vec<Connection>,
}

impl Service {
    async fn new(rig: &Rig, capacity: u32, clients: usize) -> Self {
        Self::with(rig, capacity, clients, usual).await
    }

    async fn with(
        rig: &Rig,
        capacity: u32,
        clients: usize,
        of_clients: impl Fn(ConnectionBuilder) -> ConnectionBuilder,
    ) -> Self {
        let domain = rig.domain();
        let srq = SharedReceiveQueue::new(&domain, capacity).unwrap();
        let listener = Listener::builder(&domain).srq(&srq).bind(rig.address()).await.unwrap();
        let mut this = Self { domain, srq, listener, clients: Vec::new(), servers: Vec::new() };
        let theirs = rig.domain();
        for _ in 0..clients {
            this.join(of_clients(Connection::builder(&theirs))).await;
        }
        this
    }

    async fn join(&mut self, settings: ConnectionBuilder) {
        let (client, server) = join!(settings.connect(self.listener.local_address()), self.listener.accept());
        let client = client.unwrap();
        let domain = client.domain().clone();
        self.clients.push(End::new(&domain, client));
        self.servers.push(server.unwrap());
    }

    fn id(&self, client: usize) -> ConnectionId {
        self.servers[client].id()
    }

    /// Which client's connection that is.
    fn client_of(&self, id: ConnectionId) -> usize {
        self.servers.iter().position(|server| server.id() == id).expect("a connection of this service")
    }

    fn post(&self, len: usize) -> SharedReceiveOp<Buffer> {
        let mut receive = self.srq.receive(self.domain.alloc(len).unwrap());
        receive.try_post().unwrap();
        receive
    }
}

fn number_of(message: &[u8]) -> u64 {
    u64::from_le_bytes(message[..8].try_into().unwrap())
}

async fn receive_number(srq: &SharedReceiveQueue) -> (ConnectionId, u64) {
    let (from, received) = within(SOON, srq.receive(srq.domain().alloc(8).unwrap())).await.unwrap();
    (from, number_of(received.message()))
}

async fn requests_are_answered_on_the_connection_they_came_by(rig: Rig) {
    const ROUNDS: u64 = 50;
    let mut service = Service::new(&rig, 8, 4).await;
    let connections: HashMap<_, _> = service.servers.iter().map(|server| (server.id(), server.clone())).collect();
    let mut requests = service.srq.receiver(4, 64).unwrap();
    let serving = tokio::spawn(async move {
        for _ in 0..4 * ROUNDS {
            let (from, request) = requests.next().await.unwrap().unwrap();
            let connection = &connections[&from];
            let answer = number_of(&request) + 1000;
            connection.send(connection.domain().register(answer.to_le_bytes().to_vec()).unwrap()).await.unwrap();
        }
    });
    let asking = std::mem::take(&mut service.clients).into_iter().enumerate().map(|(at, client)| async move {
        for round in 0..ROUNDS {
            let number = at as u64 * 100 + round;
            let ((), answer) = join!(client.send_number(number), client.receive_number());
            assert_eq!(answer, number + 1000);
        }
    });
    within(SOON, join_all(asking)).await;
    within(SOON, serving).await.unwrap();
}

async fn receives_are_taken_in_the_order_of_posting(rig: Rig) {
    let service = Service::new(&rig, 16, 3).await;
    let order = [0, 1, 2, 2, 1, 0, 0, 0, 2];
    let receives: Vec<_> = order.iter().map(|_| service.post(64)).collect();
    assert_eq!(service.srq.posted(), order.len());
    for (number, client) in order.into_iter().enumerate() {
        service.clients[client].send_number(number as u64).await;
    }
    for ((number, client), receive) in order.into_iter().enumerate().zip(receives) {
        let (from, received) = within(SOON, receive).await.unwrap();
        assert_eq!((from, number_of(received.message())), (service.id(client), number as u64));
        assert_eq!((received.len, received.buffer.len(), received.in_buffer), (8, 64, true));
    }
    assert_eq!(service.srq.posted(), 0);
}

/// Each gets on, and each one's messages come in order.
async fn three_connections_share_two_receives(rig: Rig) {
    const COUNT: u64 = 150;
    let service = Service::new(&rig, 2, 3).await;
    let mut messages = service.srq.receiver(2, 1000).unwrap();
    let sending = service.clients.iter().cloned().map(|client| {
        tokio::spawn(async move {
            let sends = (0..COUNT).map(|number| {
                let mut buffer = client.filled(1000, number);
                buffer[..8].copy_from_slice(&number.to_le_bytes());
                client.send(buffer)
            });
            join_all(sends).await.into_iter().for_each(|sent| drop(sent.unwrap()));
        })
    });
    let sending: Vec<_> = sending.collect();
    let mut next = [0; 3];
    for _ in 0..3 * COUNT {
        let (from, message) = within(SOON, messages.next()).await.unwrap().unwrap();
        let client = service.client_of(from);
        assert_eq!(number_of(&message), next[client]);
        assert_eq!(message[8..], crate::common::pattern(1000, next[client])[8..]);
        next[client] += 1;
    }
    assert_eq!(next, [COUNT; 3]);
    for sent in sending {
        within(SOON, sent).await.unwrap();
    }
}

async fn without_receives_peers_wait_their_turn(rig: Rig) {
    let service = Service::new(&rig, 8, 3).await;
    let mut sends = Vec::new();
    for (number, client) in service.clients.iter().enumerate() {
        let mut send = client.send(client.domain.register((number as u64).to_le_bytes().to_vec()).unwrap());
        send.try_post().unwrap();
        sends.push(send);
        if !rig.on_nic() {
            // Each is in line before the next one comes.
            let server = &service.servers[number];
            eventually(|| server.stats().rnr_sent == 1, || server.stats()).await;
        }
    }
    holds_for(Duration::from_millis(5), || sends.iter_mut().all(|send| poll_once(send).is_pending())).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        // One receive, one message, and no other.
        let (from, number) = receive_number(&service.srq).await;
        assert_eq!(from, service.id(number as usize));
        assert_eq!(service.srq.posted(), 0);
        seen.push(number);
    }
    if !rig.on_nic() {
        assert_eq!(seen, [0, 1, 2], "first come, first served");
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
    for sent in within(SOON, join_all(sends)).await {
        sent.unwrap();
    }
}

async fn a_peer_that_may_not_wait_is_told(rig: Rig) {
    let timer = Duration::from_millis(1);
    let hasty = |settings: ConnectionBuilder| settings.rnr_retry(1).rnr_timer(timer);
    let mut service = Service::with(&rig, 4, 1, hasty).await;
    let client = &service.clients[0];
    let error = within(SOON, client.send(client.filled(8, 1))).await.unwrap_err();
    assert!(matches!(error.error(), Error::Completion { status: WcStatus::RnrRetryExceeded, .. }), "{error}");
    within(SOON, service.servers[0].closed()).await;
    // It was in line; the next receive is not for it.
    let domain = client.domain.clone();
    service.join(Connection::builder(&domain)).await;
    let ((from, number), ()) = join!(receive_number(&service.srq), service.clients[1].send_number(7));
    assert_eq!((from, number), (service.id(1), 7));
}

async fn a_connection_that_ends_leaves_the_others_their_receives(rig: Rig) {
    const LEN: usize = 1 << 20;
    let service = Service::new(&rig, 6, 3).await;
    let mut messages = service.srq.receiver(6, LEN).unwrap();
    // Its messages are on their way, one of them perhaps in part.
    let doomed: Vec<_> = (0..3)
        .map(|seed| {
            let mut send = service.clients[1].send(service.clients[1].filled(LEN, seed));
            send.try_post().unwrap();
            send
        })
        .collect();
    service.servers[1].close().await;
    for send in doomed {
        drop(within(SOON, send).await);
    }
    for round in 0..20 {
        for at in [0, 2] {
            let client = &service.clients[at];
            let (sent, received) = join!(client.send(client.filled(1000, round)), async {
                loop {
                    let (from, message) = within(SOON, messages.next()).await.unwrap().unwrap();
                    if from != service.id(1) {
                        return (from, message);
                    }
                    assert_eq!(message.len(), LEN);
                }
            });
            sent.unwrap();
            assert_eq!(received.0, service.id(at));
            assert_pattern(&received.1, round);
        }
    }
    // Buffers that came back are posted when the receiver is polled.
    eventually(|| poll_once(&mut messages.next()).is_pending() && service.srq.posted() == 6, || &service.srq).await;
    // They are not only counted: each gets a message, without another poll.
    for number in 0..6 {
        within(SOON, service.clients[0].send_number(number)).await;
    }
}

/// Whatever happens to be under way when they end, no receive is lost.
async fn connections_that_end_all_the_time(rig: Rig) {
    const POSTED: usize = 4;
    let (rounds, longest) = if rig.on_nic() { (8, 100_000) } else { (40, 1 << 20) };
    let mut service = Service::new(&rig, POSTED as u32, 1).await;
    let mut messages = service.srq.receiver(POSTED, longest).unwrap();
    let domain = service.clients[0].domain.clone();
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..rounds {
        service.join(Connection::builder(&domain)).await;
        let (client, server) = (service.clients.pop().unwrap(), service.servers.pop().unwrap());
        let sends: Vec<_> = (0..6)
            .map(|seed| {
                let mut send = client.send(client.filled(random.usize(1..longest), seed));
                send.try_post().unwrap();
                tokio::spawn(send)
            })
            .collect();
        for _ in 0..random.usize(0..5) {
            tokio::task::yield_now().await;
            let _ = poll_once(&mut messages.next());
        }
        match round % 3 {
            0 => drop(client),
            1 => drop(server),
            _ => {
                client.close().await;
                server.close().await;
            }
        }
        for send in sends {
            drop(within(SOON, send).await.unwrap());
        }
    }
    let lasting = service.id(0);
    let last = tokio::spawn({
        let client = service.clients[0].clone();
        async move { client.send_number(99).await }
    });
    within(SOON, async { while messages.next().await.unwrap().unwrap().0 != lasting {} }).await;
    within(SOON, last).await.unwrap();
    // Its buffer is back in a moment, and posted.
    eventually(|| poll_once(&mut messages.next()).is_pending() && service.srq.posted() == POSTED, || &service.srq)
        .await;
    // They are not only counted: each gets a message, without another poll.
    for number in 0..POSTED as u64 {
        within(SOON, service.clients[0].send_number(number)).await;
    }
}

async fn a_message_that_is_too_long_ends_its_connection_alone(rig: Rig) {
    let service = Service::new(&rig, 4, 2).await;
    let first = service.post(100);
    let second = service.post(100);
    service.clients[0].send(service.clients[0].buffer(101)).await.unwrap_err();
    let (error, buffer) = within(SOON, first).await.unwrap_err().into_parts();
    let [expected, _] = too_long(&rig);
    assert!(matches!(error, Error::Completion { status, .. } if status == expected), "{error}");
    assert_eq!(buffer.unwrap().len(), 100);
    assert!(matches!(within(SOON, service.servers[0].closed()).await, CloseReason::Failed(_)));
    service.clients[1].send(service.clients[1].filled(100, 5)).await.unwrap();
    let (from, received) = within(SOON, second).await.unwrap();
    assert_eq!(from, service.id(1));
    assert_pattern(received.message(), 5);
}

async fn connections_keep_the_queue(rig: Rig) {
    let Service { domain, srq, listener, clients, servers } = Service::new(&rig, 4, 2).await;
    let pool = tokio_rdma::BufferPool::new(&domain, 64, 3).unwrap();
    let mut receives: Vec<_> = (0..3)
        .map(|_| {
            let mut receive = srq.receive(pool.try_get().unwrap());
            receive.try_post().unwrap();
            receive
        })
        .collect();
    drop((srq, listener));
    clients[0].send_number(1).await;
    let (from, received) = within(SOON, receives.remove(0)).await.unwrap();
    assert_eq!((from, number_of(received.message())), (servers[0].id(), 1));
    drop(received);
    servers[0].close().await;
    clients[1].send_number(2).await;
    let (from, _) = within(SOON, receives.remove(0)).await.unwrap();
    assert_eq!(from, servers[1].id());
    // The last one's end is the queue's.
    servers[1].close().await;
    let (error, buffer) = within(SOON, receives.remove(0)).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Closed { reason: CloseReason::Local, .. }), "{error}");
    drop(buffer.unwrap());
    eventually(|| pool.available() == 3, || pool.available()).await;
}

async fn the_queue_keeps_no_connection(rig: Rig) {
    let service = Service::new(&rig, 4, 2).await;
    let pool = tokio_rdma::BufferPool::new(&service.domain, 64, 2).unwrap();
    let mut kept = service.srq.receive(pool.try_get().unwrap());
    kept.try_post().unwrap();
    let mut dropped = service.srq.receive(pool.try_get().unwrap());
    dropped.try_post().unwrap();
    drop(dropped);
    let Service { srq, listener, clients, servers, .. } = service;
    drop((listener, servers));
    for client in &clients {
        within(SOON, client.closed()).await;
    }
    assert_eq!(srq.posted(), 2);
    holds_for(Duration::from_millis(5), || poll_once(&mut kept).is_pending()).await;
    drop(srq);
    // The listener's task may have had it for a moment longer.
    let (error, buffer) = within(SOON, kept).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Closed { .. }), "{error}");
    drop(buffer.unwrap());
    eventually(|| pool.available() == 2, || pool.available()).await;
}

async fn a_listener_keeps_the_queue(rig: Rig) {
    let mut service = Service::new(&rig, 4, 0).await;
    let receive = service.post(8);
    let domain = rig.domain();
    let other = SharedReceiveQueue::new(&service.domain, 1).unwrap();
    drop(std::mem::replace(&mut service.srq, other));
    service.join(Connection::builder(&domain)).await;
    service.clients[0].send_number(3).await;
    assert_eq!(within(SOON, receive).await.unwrap().0, service.id(0));
}

async fn a_dropped_receive_keeps_its_buffer_until_a_message_came(rig: Rig) {
    let service = Service::new(&rig, 4, 2).await;
    let pool = tokio_rdma::BufferPool::new(&service.domain, 64, 2).unwrap();
    let mut receive = service.srq.receive(pool.try_get().unwrap());
    receive.try_post().unwrap();
    drop(receive);
    let mut held = pool.try_get().expect("the other one is free");
    assert!(pool.try_get().is_none(), "the device still has it");
    fill(&mut held, 9);
    drop(service.srq.receive(service.domain.alloc(8).unwrap()));
    assert_eq!(service.srq.posted(), 1, "what was never polled was not posted");
    service.clients[1].send(service.clients[1].filled(64, 1)).await.unwrap();
    eventually(|| pool.available() == 1, || &service.srq).await;
    assert_pattern(&held, 9);
    assert_pattern(&pool.try_get().unwrap(), 1);
    let ((from, number), ()) = join!(receive_number(&service.srq), service.clients[0].send_number(4));
    assert_eq!((from, number), (service.id(0), 4));
}

async fn a_dropped_receiver_leaves_its_receives(rig: Rig) {
    let service = Service::new(&rig, 4, 1).await;
    let client = &service.clients[0];
    let before = service.domain.stats().live_buffers;
    let mut messages = service.srq.receiver(3, 64).unwrap();
    client.send(client.filled(64, 1)).await.unwrap();
    let (_, held) = within(SOON, messages.next()).await.unwrap().unwrap();
    client.send(client.filled(64, 2)).await.unwrap();
    eventually(|| service.srq.posted() == 1, || &service.srq).await;
    drop(messages);
    // The last of its receives gets this, and nobody hears of it.
    client.send(client.filled(64, 3)).await.unwrap();
    eventually(|| service.srq.posted() == 0, || &service.srq).await;
    // What it had not given out, and what the device had, is released.
    eventually(|| service.domain.stats().live_buffers == before + 1, || service.domain.stats()).await;
    assert_pattern(&held, 1);
    let mut messages = service.srq.receiver(4, 64).unwrap();
    client.send_number(4).await;
    let (_, message) = within(SOON, messages.next()).await.unwrap().unwrap();
    assert_eq!(number_of(&message), 4);
}

async fn two_receivers_take_turns(rig: Rig) {
    let service = Service::new(&rig, 4, 1).await;
    let mut receivers = [service.srq.receiver(1, 8).unwrap(), service.srq.receiver(1, 8).unwrap()];
    for number in 0..20 {
        let receiver = &mut receivers[number as usize % 2];
        let ((), message) = join!(service.clients[0].send_number(number), within(SOON, receiver.next()));
        assert_eq!(number_of(&message.unwrap().unwrap().1), number);
        // The buffer is back, and posted behind the other one's.
        assert!(poll_once(&mut receiver.next()).is_pending());
    }
}

async fn receives_wait_for_a_place(rig: Rig) {
    let service = Service::new(&rig, 2, 1).await;
    let first = service.post(8);
    let second = service.post(8);
    let mut third = service.srq.receive(service.domain.alloc(8).unwrap());
    let error = third.try_post().unwrap_err();
    assert!(matches!(error, Error::QueueFull { depth: 2, .. }), "{error}");
    let third = tokio::spawn(third);
    let mut given_up = Box::pin(service.srq.receive(service.domain.alloc(8).unwrap()));
    tokio::task::yield_now().await;
    assert!(poll_once(&mut given_up).is_pending());
    drop(given_up);
    for number in 0..3 {
        service.clients[0].send_number(number).await;
    }
    for (number, received) in
        [within(SOON, first).await, within(SOON, second).await, within(SOON, third).await.unwrap()]
            .into_iter()
            .enumerate()
    {
        assert_eq!(number_of(received.unwrap().1.message()), number as u64);
    }
}

async fn a_receive_has_a_deadline(rig: Rig) {
    let service = Service::new(&rig, 2, 1).await;
    let pool = tokio_rdma::BufferPool::new(&service.domain, 8, 1).unwrap();
    let error = service.srq.receive(pool.get().await).timeout(Duration::from_millis(5)).await.unwrap_err();
    assert!(matches!(error.error(), Error::Timeout { .. }), "{error}");
    assert!(error.into_buffer().is_none(), "the device has it");
    assert_eq!((service.srq.posted(), pool.available()), (1, 0));
    service.clients[0].send_number(1).await;
    eventually(|| pool.available() == 1, || &service.srq).await;
}

async fn sixty_four_connections_and_one_stream(rig: Rig) {
    const CLIENTS: usize = 64;
    let count = if rig.on_nic() { 5 } else { 30 };
    let service = Service::new(&rig, 32, CLIENTS).await;
    let mut messages = service.srq.receiver(32, 256).unwrap();
    let sending = service.clients.iter().cloned().map(|client| {
        tokio::spawn(async move {
            for number in 0..count {
                client.send_number(number).await;
            }
        })
    });
    let sending: Vec<_> = sending.collect();
    let places: HashMap<_, _> = service.servers.iter().enumerate().map(|(at, server)| (server.id(), at)).collect();
    assert_eq!(places.len(), CLIENTS, "each has an id of its own");
    let mut next = [0; CLIENTS];
    let mut held: Vec<Message> = Vec::new();
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..CLIENTS as u64 * count {
        let (from, message) = within(SOON, messages.next()).await.unwrap().unwrap();
        let at = places[&from];
        assert_eq!(number_of(&message), next[at]);
        next[at] += 1;
        held.push(message);
        while held.len() > random.usize(..30) {
            held.swap_remove(random.usize(..held.len()));
        }
    }
    assert_eq!(next, [count; CLIENTS]);
    for sent in sending {
        within(SOON, sent).await.unwrap();
    }
}

async fn everything_that_uses_up_a_receive(rig: Rig) {
    let service = Service::new(&rig, 8, 1).await;
    let mut messages = service.srq.receiver(4, 100).unwrap();
    let region = service.domain.alloc(64).unwrap().expose(tokio_rdma::Access::all()).unwrap();
    let client = &service.clients[0];
    client.send(client.filled(10, 1)).await.unwrap();
    client.send_with_immediate(client.filled(20, 2), 7).await.unwrap();
    client.write_with_immediate(client.filled(64, 3), &region.remote(), 8).await.unwrap();
    client.send(client.empty()).await.unwrap();
    // These use none.
    client.write(client.filled(64, 4), &region.remote()).await.unwrap();
    assert_pattern(&client.fetch(&region.remote()).await, 4);
    let mut told = Vec::new();
    for _ in 0..4 {
        let (_, message) = within(SOON, messages.next()).await.unwrap().unwrap();
        told.push((message.len(), message.immediate(), message.written()));
    }
    assert_eq!(told, [(10, None, None), (20, Some(7), None), (0, Some(8), Some(64)), (0, None, None)]);
    assert_pattern(&contents(&region), 4);
}

async fn lists_are_received_into(rig: Rig) {
    let service = Service::new(&rig, 8, 1).await;
    let buffer = |len| service.domain.alloc(len).unwrap();
    let mut receive = service.srq.receive(SgList::new().with(buffer(10)).with(buffer(20)));
    receive.try_post().unwrap();
    let client = &service.clients[0];
    client.send(client.filled(30, 6)).await.unwrap();
    let (_, received) = within(SOON, receive).await.unwrap();
    assert_eq!(received.len, 30);
    let bytes: Vec<u8> = received.buffer.iter().flat_map(|segment| segment.to_vec()).collect();
    assert_pattern(&bytes, 6);
    let long = (0..5).fold(SgList::new(), |list, _| list.with(buffer(1)));
    let error = service.srq.receive(long).await.unwrap_err();
    assert!(matches!(error.error(), Error::Limit { value: 5, limit: 4, .. }), "{error}");
    assert!(error.into_buffer().is_some());
}

async fn a_message_may_come_before_its_connection(rig: Rig) {
    let mut service = Service::new(&rig, 8, 0).await;
    let receives: Vec<_> = (0..2).map(|_| service.post(8)).collect();
    let domain = rig.domain();
    let connecting = Connection::connect(&domain, service.listener.local_address());
    let client = End::new(&domain, within(SOON, connecting).await.unwrap());
    for number in 0..2 {
        within(SOON, client.send_number(number)).await;
    }
    let mut from = Vec::new();
    for (number, receive) in receives.into_iter().enumerate() {
        let (id, received) = within(SOON, receive).await.unwrap();
        assert_eq!(number_of(received.message()), number as u64);
        from.push(id);
    }
    service.servers.push(within(SOON, service.listener.accept()).await.unwrap());
    assert_eq!(from, [service.id(0); 2]);
}

async fn a_client_of_many_servers(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let srq = SharedReceiveQueue::new(&client, 4).unwrap();
    let listener = rig.listener(&server).await;
    let mut pairs = Vec::new();
    for _ in 0..3 {
        let connecting = Connection::builder(&client).srq(&srq).connect(listener.local_address());
        let (connected, accepted) = join!(connecting, listener.accept());
        pairs.push((connected.unwrap(), End::new(&server, accepted.unwrap())));
    }
    for (number, (connected, accepted)) in pairs.iter().enumerate() {
        let ((from, received), ()) = join!(receive_number(&srq), accepted.send_number(number as u64));
        assert_eq!((from, received), (connected.id(), number as u64));
        assert_ne!(connected.id(), accepted.id());
    }
}

async fn completion_queues_share_the_receives(rig: Rig) {
    let device = rig.open((rig.setup.device)().completion_queues(3));
    let domain = device.alloc_pd().unwrap();
    let srq = SharedReceiveQueue::new(&domain, 8).unwrap();
    let listener = Listener::builder(&domain).srq(&srq).bind(rig.address()).await.unwrap();
    let mut service = Service { domain, srq, listener, clients: Vec::new(), servers: Vec::new() };
    let theirs = rig.domain();
    for _ in 0..6 {
        service.join(Connection::builder(&theirs)).await;
    }
    let mut messages = service.srq.receiver(8, 8).unwrap();
    for round in 0..10 {
        for client in &service.clients {
            client.send_number(round).await;
        }
        let mut seen = Vec::new();
        for _ in 0..6 {
            let (from, message) = within(SOON, messages.next()).await.unwrap().unwrap();
            assert_eq!(number_of(&message), round);
            seen.push(service.client_of(from));
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    }
}

async fn the_connection_itself_has_no_receives(rig: Rig) {
    let service = Service::new(&rig, 8, 1).await;
    let server = &service.servers[0];
    let mut receive = server.receive(service.domain.alloc(8).unwrap());
    assert!(matches!(receive.try_post(), Err(Error::SharedReceiveQueue { .. })));
    let (error, buffer) = within(SOON, receive).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::SharedReceiveQueue { operation: "receive" }), "{error}");
    assert!(error.to_string().contains("SharedReceiveQueue::receive"), "{error}");
    assert!(error.is_caller_error());
    assert_eq!(buffer.unwrap().len(), 8);
    assert!(matches!(server.receiver(1, 8), Err(Error::SharedReceiveQueue { .. })));
    // All else is as ever, and the other end has receives.
    let (sent, received) =
        join!(server.send(service.domain.alloc(8).unwrap()), service.clients[0].receive(service.clients[0].buffer(8)));
    sent.unwrap();
    assert_eq!(received.unwrap().len, 8);
    exercise(&rig.connect(&service.domain, &service.clients[0].domain).await).await;
}

async fn what_does_not_fit_is_refused(rig: Rig) {
    let device = rig.device();
    let domain = device.alloc_pd().unwrap();
    let limits = device.limits();
    for (capacity, sge) in
        [(0, 1), (1, 0), (limits.max_srq_depth.saturating_add(1), 1), (1, limits.max_srq_sge.saturating_add(1))]
    {
        let error = SharedReceiveQueue::builder(&domain, capacity).max_sge(sge).build().unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{capacity}, {sge}: {error}");
    }
    let srq = SharedReceiveQueue::new(&domain, 4).unwrap();
    assert_eq!(srq.capacity(), 4);
    for (count, size) in [(0, 1), (1, 0), (5, 1)] {
        assert!(matches!(srq.receiver(count, size).unwrap_err(), Error::Limit { .. }));
    }
    let other = device.alloc_pd().unwrap();
    let error = srq.receive(other.alloc(8).unwrap()).await.unwrap_err();
    assert!(matches!(error.error(), Error::ForeignBuffer { .. }), "{error}");
    let error = Connection::builder(&other).srq(&srq).connect(rig.address()).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("protection domain"), "{error}");
    let _all = srq.receiver(4, 1).unwrap();
    assert!(matches!(srq.receiver(1, 1).unwrap_err(), Error::QueueFull { .. }));
}

async fn an_endpoint_needs_a_receive_of_its_own_on_a_nic(rig: Rig) {
    let (one, other) = (rig.domain(), rig.domain());
    let srq = SharedReceiveQueue::new(&one, 4).unwrap();
    let first = Connection::builder(&one).srq(&srq).endpoint(rig.address()).await;
    if rig.on_nic() {
        let error = first.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        return;
    }
    let (first, second) = (first.unwrap(), Connection::builder(&other).endpoint(rig.address()).await.unwrap());
    let endpoints = (first.endpoint().clone(), second.endpoint().clone());
    let (first, second) = join!(first.connect(&endpoints.1), second.connect(&endpoints.0));
    let (first, second) = (first.unwrap(), End::new(&other, second.unwrap()));
    let ((from, number), ()) = join!(receive_number(&srq), second.send_number(5));
    assert_eq!((from, number), (first.id(), 5));
}
