//! The end that measures.

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use tokio_rdma::{Address, Connection, ProtectionDomain};

use crate::common::child::within;
use crate::common::units::size;
use crate::flight::{Maker, Slot};
use crate::laps::Laps;
use crate::memory::{Memory, compare, pattern};
use crate::plan::{Operation, Options, Row};
use crate::report::{Figures, Report};
use crate::wire::{Answer, Control, Request};

/// Connects, measures every row, and reports. Fails at the first thing that is not as it should be.
pub async fn run<M: Memory>(options: &Options, memory: &M, address: &Address) -> Result<()> {
    let rows = options.rows()?;
    let domain = options.open_device()?.alloc_pd()?;
    let here = memory.describe(&domain)?;
    let connecting = Connection::builder(&domain).setup_timeout(options.limit()).connect(address);
    let connection = connecting.await.with_context(|| format!("no connection to {address}"))?;
    let mut control = Control::new(connection, options.limit())?;
    let there = match control.hear().await.context("waiting for the server's greeting")? {
        Answer::Hello { memory } => memory,
        other => return other.unexpected(),
    };

    let mut report = Report::new(control.connection(), options.mode(), [here, there]);
    let bar = ProgressBar::new(rows.len() as u64);
    bar.set_style(ProgressStyle::with_template("{pos}/{len} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    for row in rows {
        let name = format!("{} of {}", row.operation, size(row.size));
        bar.set_message(name.clone());
        let mut client = Client { options, memory, domain: &domain, address, control: &mut control, row };
        report.add(row, client.measure().await.context(name)?);
        bar.inc(1);
    }
    bar.finish_and_clear();

    control.tell(&Request::Bye).await.context("saying goodbye")?;
    control.close().await;
    report.print()?;
    report.write(options.json.as_deref(), options.svg.as_deref())
}

struct Client<'a, M> {
    options: &'a Options,
    memory: &'a M,
    domain: &'a ProtectionDomain,
    address: &'a Address,
    control: &'a mut Control,
    row: Row,
}

impl<M: Memory> Client<'_, M> {
    async fn measure(&mut self) -> Result<Figures> {
        let (limit, row) = (self.options.limit(), self.row);
        let (connection, region) = within(limit, "setup", self.connect()).await?;
        let mut maker = Maker { connection: &connection, row, region, counted: 0 };
        let mut slots = (0..row.depth as usize).map(|index| self.slot(index)).collect::<Result<Vec<_>>>()?;
        within(limit, "comparing contents", self.check(&mut maker, &mut slots)).await?;

        let (warm_up, pace) = (self.options.warm_up(), self.options.pace());
        within(warm_up.most(limit), "warming up", Laps::run(&mut maker, &mut slots, warm_up)).await?;
        let laps = within(pace.most(limit), "measuring", Laps::run(&mut maker, &mut slots, pace)).await?;
        ensure!(laps.count() > 0, "no operation was made in the time; raise --duration");
        let figures = Figures::new(row, &laps, &connection);
        connection.close().await;
        Ok(figures)
    }

    /// A connection for this row, with all in place at the server.
    async fn connect(&mut self) -> Result<(Connection, Option<tokio_rdma::RemoteRegion>)> {
        self.control.tell(&Request::Start(self.row)).await?;
        let (ticket, region) = match self.control.hear().await? {
            Answer::Ready { ticket, region } => (ticket, Answer::region(region.as_deref())?),
            other => return other.unexpected(),
        };
        let pieces = (self.row.size as u64).div_ceil(self.control.connection().max_message()).max(1) as u32;
        let settings =
            Connection::builder(self.domain).send_depth(self.row.depth * pieces).receive_depth(self.row.depth);
        let connection = settings.private_data(ticket).connect(self.address).await?;
        match self.control.hear().await? {
            Answer::Posted => Ok((connection, region)),
            other => other.unexpected(),
        }
    }

    fn slot(&self, index: usize) -> Result<Slot<M::Buffer>> {
        let Row { operation, size, .. } = self.row;
        let mut buffer = self.memory.alloc(self.domain, size)?;
        if operation != Operation::Read {
            self.memory.fill(&mut buffer, &pattern(size, self.row.seed(index)))?;
        }
        let answer = match operation {
            Operation::RoundTrip => Some(self.memory.alloc(self.domain, size)?),
            _ => None,
        };
        Ok(Slot { index, buffer, answer })
    }

    /// One operation of each slot, compared where the bytes arrive.
    async fn check(&mut self, maker: &mut Maker<'_>, slots: &mut Vec<Slot<M::Buffer>>) -> Result<()> {
        let flights = slots.drain(..).map(|slot| maker.post(slot)).collect::<Result<Vec<_>>>()?;
        for flight in flights {
            let slot = flight.land().await?;
            let arrived = match self.row.operation {
                Operation::RoundTrip => slot.answer.as_ref(),
                Operation::Read => Some(&slot.buffer),
                _ => None,
            };
            if let Some(arrived) = arrived {
                let bytes = self.memory.bytes(arrived)?;
                compare(format_args!("message {}", slot.index), &bytes, self.row.seed(slot.index))
                    .map_err(|fault| anyhow!(fault))?;
            }
            slots.push(slot);
        }
        self.control.tell(&Request::Check).await?;
        match self.control.hear().await? {
            Answer::Checked { fault: None } => Ok(()),
            Answer::Checked { fault: Some(fault) } => {
                bail!("other bytes arrived at the server than were sent: {fault}")
            }
            other => other.unexpected(),
        }
    }
}
