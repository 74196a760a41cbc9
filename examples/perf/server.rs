//! The far end: memory, receives, answers, and a look at what arrived.

use std::collections::VecDeque;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio_rdma::op::{OpError, ReceiveOp, Received, SendOp};
use tokio_rdma::{Access, CloseReason, Connection, Error, ExposedRegion, Listener, SourceBuffer, TargetBuffer};

use crate::common::child::{announce, within};
use crate::memory::{Exposed, Memory, compare, pattern};
use crate::plan::{MAX_DEPTH, Operation, Options, Row, WORD};
use crate::wire::{Answer, Control, Request};

/// What the deepest row needs.
const MOST_RECEIVES: u32 = 2 * MAX_DEPTH;

/// Serves one client, from its first row to its farewell.
pub async fn run<M: Memory>(options: &Options, memory: &M) -> Result<()> {
    let device = options.open_device()?;
    let domain = device.alloc_pd()?;
    let described = memory.describe(&domain)?;
    let address = options.address.clone().map_or_else(|| device.local_address(0), Ok)?;
    let receives = device.limits().max_queue_depth.min(MOST_RECEIVES);
    let settings = Listener::builder(&domain).connections(|connection| connection.receive_depth(receives));
    let listener = settings.bind(address).await.context("cannot listen; --address names another place")?;
    announce(listener.local_address())?;

    let accepting = tokio::time::timeout(options.wait(), listener.accept()).await;
    let connection =
        accepting.map_err(|_| anyhow!("no client within {:?}; --wait sets the limit", options.wait()))??;
    let mut control = Control::new(connection, options.limit())?;
    control.tell(&Answer::Hello { memory: described }).await?;
    loop {
        match control.hear_within(options.wait()).await.context("waiting for a request")? {
            Request::Start(row) => {
                let mut server = Server { options, memory, listener: &listener, receives, control: &mut control, row };
                if let Err(error) = server.serve().await {
                    // The client says it too, if it is there to hear it.
                    let _ = control.tell(&Answer::Refused { why: format!("{error:#}") }).await;
                    return Err(error.context(row.operation.to_string()));
                }
            }
            Request::Bye => break,
            Request::Check => bail!("the client wants something checked, and started no row"),
        }
    }
    match tokio::time::timeout(options.limit(), control.connection().closed()).await {
        Ok(CloseReason::Peer) => Ok(()),
        Ok(reason) => Err(anyhow!("the client said goodbye, and then: {reason}")),
        Err(_) => Err(anyhow!("the client said goodbye and did not close")),
    }
}

struct Server<'a, M> {
    options: &'a Options,
    memory: &'a M,
    listener: &'a Listener,
    /// The most that a connection takes.
    receives: u32,
    control: &'a mut Control,
    row: Row,
}

impl<M: Memory> Server<'_, M> {
    /// One row.
    async fn serve(&mut self) -> Result<()> {
        let (limit, row) = (self.options.limit(), self.row);
        row.check()?;
        let domain = self.control.connection().domain().clone();
        let mut target = None;
        let mut counter = None;
        if row.operation.is_atomic() {
            // Of the host in any case: a word, which this side looks at.
            counter = Some(domain.alloc(WORD)?.expose(Access::all())?);
        } else if row.operation.is_one_sided() {
            target = Some(self.memory.expose(&domain, &self.initial())?);
        }
        let remote = counter.as_ref().map(ExposedRegion::remote).or(target.as_ref().map(M::Exposed::remote));
        let region = remote.map(|remote| remote.to_bytes().to_vec());
        let connection = within(limit, "waiting for the connection of the row", self.accept(region)).await?;

        let mut far = Far { connection: &connection, receives: VecDeque::new(), sends: VecDeque::new() };
        if row.operation.is_received() {
            for _ in 0..row.receives().min(self.receives) {
                far.post(self.memory.alloc(&domain, row.receive_len())?)?;
            }
        }
        self.control.tell(&Answer::Posted).await?;

        let checking = async {
            let mut fault = None;
            if row.operation.is_received() {
                for index in 0..row.depth as usize {
                    let received = far.next().await?;
                    fault = fault.or(self.examine(index, &received)?);
                    self.go_on(&mut far, received).await?;
                }
            }
            match self.control.hear().await? {
                Request::Check => anyhow::Ok(fault),
                other => bail!("{other:?} in the middle of a row"),
            }
        };
        let mut fault = within(limit, "comparing contents", checking).await?;
        if matches!(row.operation, Operation::Write | Operation::WriteImm) {
            fault = fault.or(self.examine_memory(target.as_ref())?);
        }
        if let Some(counter) = &counter {
            let found = counter.load(0)?;
            let wrong = found != u64::from(row.depth);
            fault = fault.or(wrong.then(|| format!("the counter is {found} instead of {}", row.depth)));
        }
        let failed = fault.clone();
        self.control.tell(&Answer::Checked { fault }).await?;
        if let Some(fault) = failed {
            bail!(fault);
        }

        match self.answer(&mut far).await {
            Ok(()) => {}
            Err(error) if connection.close_reason() == Some(CloseReason::Peer) && is_closed::<M>(&error) => {}
            Err(error) => return Err(error),
        }
        match connection.closed().await {
            CloseReason::Peer => Ok(()),
            reason => bail!("the connection of the row: {reason}"),
        }
    }

    /// The connection that shows the ticket. Others, which somebody else makes, are dropped.
    async fn accept(&mut self, region: Option<Vec<u8>>) -> Result<Connection> {
        let ticket: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(16).collect();
        self.control.tell(&Answer::Ready { ticket: ticket.clone(), region }).await?;
        loop {
            let connection = self.listener.accept().await?;
            if connection.peer_private_data() == ticket {
                return Ok(connection);
            }
        }
    }

    /// What the memory holds before the client comes: what it will read, or nothing.
    fn initial(&self) -> Vec<u8> {
        let row = self.row;
        let mut bytes = vec![0; row.memory()];
        if row.operation == Operation::Read {
            for (index, slot) in bytes.chunks_mut(row.stride()).enumerate() {
                slot[..row.size].copy_from_slice(&pattern(row.size, row.seed(index)));
            }
        }
        bytes
    }

    /// What is wrong with the message of this number.
    fn examine(&self, index: usize, received: &Received<M::Buffer>) -> Result<Option<String>> {
        let row = self.row;
        let immediate = matches!(row.operation, Operation::SendImm | Operation::WriteImm).then_some(index as u32);
        let in_buffer = row.operation != Operation::WriteImm;
        if (received.len, received.immediate, received.in_buffer) != (row.size, immediate, in_buffer) {
            return Ok(Some(format!(
                "message {index}: {} bytes with immediate data {:?} instead of {} with {immediate:?}",
                received.len, received.immediate, row.size
            )));
        }
        if !in_buffer {
            return Ok(None);
        }
        let bytes = self.memory.bytes(&received.buffer)?;
        Ok(compare(format_args!("message {index}"), &bytes, row.seed(index)).err())
    }

    /// What is wrong with the memory that was written.
    fn examine_memory(&self, target: Option<&M::Exposed>) -> Result<Option<String>> {
        let bytes = target.context("no memory is exposed")?.bytes()?;
        let slots = bytes.chunks(self.row.stride()).enumerate();
        let faults = slots.filter_map(|(index, slot)| {
            compare(format_args!("slot {index}"), &slot[..self.row.size], self.row.seed(index)).err()
        });
        Ok(faults.into_iter().next())
    }

    /// Answers a message, where it is to be answered, and posts a receive again.
    async fn go_on(&self, far: &mut Far<'_, M::Buffer>, received: Received<M::Buffer>) -> Result<()> {
        if self.row.operation != Operation::RoundTrip {
            return far.post(received.buffer);
        }
        ensure!(received.len == self.row.size, "{} bytes instead of {}", received.len, self.row.size);
        let mut send = far.connection.send(received.buffer);
        // What cannot be posted right away is when it is awaited, or then says why not.
        let _ = send.try_post();
        far.sends.push_back(send);
        // The others are on their way meanwhile, and receives enough are posted.
        if far.sends.len() > far.receives.len() {
            if let Some(send) = far.sends.pop_front() {
                let buffer = send.await?;
                far.post(buffer)?;
            }
        }
        Ok(())
    }

    /// Receives and answers until the client closes.
    async fn answer(&self, far: &mut Far<'_, M::Buffer>) -> Result<()> {
        while !far.receives.is_empty() {
            let received = far.next().await?;
            self.go_on(far, received).await?;
        }
        Ok(())
    }
}

/// The receives of a row, and its answers under way.
struct Far<'a, B: SourceBuffer + TargetBuffer> {
    connection: &'a Connection,
    receives: VecDeque<ReceiveOp<B>>,
    sends: VecDeque<SendOp<B>>,
}

impl<B: SourceBuffer + TargetBuffer> Far<'_, B> {
    async fn next(&mut self) -> Result<Received<B>> {
        Ok(self.receives.pop_front().context("no receive is posted")?.await?)
    }

    fn post(&mut self, buffer: B) -> Result<()> {
        let mut receive = self.connection.receive(buffer);
        receive.try_post()?;
        self.receives.push_back(receive);
        Ok(())
    }
}

/// Whether an operation ended since the client has what it wanted.
fn is_closed<M: Memory>(error: &anyhow::Error) -> bool {
    let error = match error.downcast_ref::<OpError<M::Buffer>>() {
        Some(error) => Some(error.error()),
        None => error.downcast_ref::<Error>(),
    };
    matches!(error, Some(Error::Closed { .. }))
}
