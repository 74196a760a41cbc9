//! A worker's place at the server: its connection, and the memory that it writes gradients into.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};
use tokio_rdma::{Access, BufferPool, Connection, ExposedRegion};

use crate::compute::{Keeper, Slot, Taken};
use crate::wire::{GRADIENT_LEN, Header, Hello, Order, Published, Welcome, Work};

/// A worker has one gradient on its way, so one notice; one more that nobody asked for is to be noticed as well.
const RECEIVES: usize = 2;

/// The longest gradient that is taken, as a vector. One of these pictures is shorter than 10 unless the parameters run away; a step along one
/// that is longer than this would spoil them for everybody.
const MOST_NORM: f64 = 100.0;

/// The highest loss that is taken; guessing has one of 2.3.
const MOST_LOSS: f32 = 1e6;

/// How long a worker may take to say goodbye when all is done.
const FAREWELL: Duration = Duration::from_secs(3);

/// What the training hears of a worker: that it left if it had joined, that it was refused if it never did.
pub enum Event<G> {
    Joined {
        worker: u32,
        greeting: String,
        commands: UnboundedSender<Command>,
    },
    Delivered {
        worker: u32,
        header: Header,
        loss: f32,
        gradient: G,
    },
    Left {
        worker: u32,
        why: String,
    },
    Refused {
        worker: u32,
        why: String,
    },
    /// No worker's doing: gradients cannot be taken any more.
    Broken {
        why: String,
    },
}

/// What the training wants of a worker. When no more can come, the training is over.
pub enum Command {
    Work(Work),
    /// It did something wrong; nothing more is taken from it.
    Dismiss,
}

/// What a seat is set up with.
pub struct Terms<K> {
    pub keeper: Arc<K>,
    pub seed: u64,
    pub batch: u32,
    pub published: Published,
    /// How long a worker may keep a ticket.
    pub patience: Duration,
}

/// Serves a worker until one side has had enough, and tells the training.
pub async fn serve<K: Keeper>(
    worker: u32,
    connection: Connection,
    terms: Terms<K>,
    events: Sender<Event<K::Gradient>>,
) {
    let event = match Seat::<K>::new(worker, connection, terms, events.clone()).await {
        Ok((mut seat, commands)) => {
            let outcome = seat.talk(commands).await;
            let why = outcome.map_or_else(|error| format!("{error:#}"), |()| "finished".to_owned());
            Event::Left { worker, why }
        }
        Err(error) => Event::Refused { worker, why: format!("{error:#}") },
    };
    // Nobody listens when the training has ended before.
    let _ = events.send(event).await;
}

struct Seat<K: Keeper> {
    worker: u32,
    connection: Connection,
    header: ExposedRegion,
    slot: K::Slot,
    /// Room for an order; one is on its way at a time.
    orders: BufferPool,
    patience: Duration,
    events: Sender<Event<K::Gradient>>,
    /// The ticket that the worker has, and until when it may keep it.
    owed: Option<(u64, Instant)>,
    welcome: Welcome,
}

impl<K: Keeper> Seat<K> {
    async fn new(
        worker: u32,
        connection: Connection,
        terms: Terms<K>,
        events: Sender<Event<K::Gradient>>,
    ) -> Result<(Self, UnboundedReceiver<Command>)> {
        let hello = Hello::from_bytes(connection.peer_private_data())?;
        let domain = connection.domain();
        let header = domain.alloc(Header::LEN)?.expose(Access::REMOTE_WRITE)?;
        let Terms { keeper, seed, batch, published, patience } = terms;
        let slot = keeper.slot(domain)?;
        let orders = BufferPool::new(domain, Order::MAX_LEN, 1)?;
        let welcome = Welcome { worker, batch, seed, published, header: header.remote(), gradient: slot.remote() };
        let greeting = format!("computes on {}, link {}", hello.computes_on.escape_debug(), connection.link());
        let (commands, receiver) = unbounded_channel();
        // When the training has ended meanwhile, no command can come any more, and the worker hears that.
        let _ = events.send(Event::Joined { worker, greeting, commands }).await;
        let seat = Self { worker, connection, header, slot, orders, patience, events, owed: None, welcome };
        Ok((seat, receiver))
    }

    async fn talk(&mut self, mut commands: UnboundedReceiver<Command>) -> Result<()> {
        let mut notices = self.connection.receiver(RECEIVES, 8)?;
        self.tell(Order::Welcome(self.welcome)).await?;
        loop {
            // Without a ticket there is nothing to wait for.
            let late = self.owed.map_or_else(|| Instant::now() + self.patience, |(_, until)| until);
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Work(work)) => {
                        self.owed = Some((work.ticket, Instant::now() + self.patience));
                        self.tell(Order::Work(work)).await?;
                    }
                    Some(Command::Dismiss) => return Ok(()),
                    None => {
                        self.tell(Order::Finish).await?;
                        // It has closed, or is not worth waiting for.
                        let _ = tokio::time::timeout(FAREWELL, self.connection.closed()).await;
                        return Ok(());
                    }
                },
                notice = notices.next() => match notice {
                    Some(notice) => {
                        let notice = notice?;
                        let written = notice.written().context("a message instead of a gradient")?;
                        let immediate = notice.immediate().context("a write without immediate data")?;
                        self.take(written, immediate).await?;
                    }
                    None => bail!("its connection ended"),
                },
                () = sleep_until(late), if self.owed.is_some() => {
                    bail!("no gradient within {:?}; --patience sets the limit", self.patience)
                }
            }
        }
    }

    /// Takes the gradient out of the slot, which then is free. The worker writes header and gradient, in this order, and the notice
    /// of the second write comes after the bytes of both.
    async fn take(&mut self, written: usize, immediate: u32) -> Result<()> {
        let (ticket, _) = self.owed.take().context("a gradient that nobody asked for")?;
        let mut bytes = [0; Header::LEN];
        self.header.copy_to(0, &mut bytes)?;
        let header = Header::from_bytes(&bytes);
        ensure!(written == GRADIENT_LEN, "a gradient of {written} bytes instead of {GRADIENT_LEN}");
        ensure!(
            immediate == ticket as u32 && header.ticket == ticket,
            "a gradient for ticket {} with the immediate {immediate}, not for {ticket}",
            header.ticket
        );
        ensure!(
            (1..=self.welcome.batch).contains(&header.samples),
            "a gradient of {} samples, the limit is {}",
            header.samples,
            self.welcome.batch
        );
        let taken = match self.slot.take().await {
            Ok(taken) => taken,
            Err(error) => {
                let _ = self.events.send(Event::Broken { why: format!("no gradient can be taken: {error:#}") }).await;
                return Err(error);
            }
        };
        let Taken { gradient, norm, loss } = taken;
        // NaN is in neither range.
        ensure!((0.0..=MOST_LOSS).contains(&loss), "a loss of {loss}, the limits are 0 and {MOST_LOSS}; lower --rate");
        ensure!(norm <= MOST_NORM, "a gradient of the length {norm:.0}, the limit is {MOST_NORM}; lower --rate");
        let event = Event::Delivered { worker: self.worker, header, loss, gradient };
        self.events.send(event).await.ok().context("the training has ended")
    }

    async fn tell(&self, order: Order) -> Result<()> {
        let bytes = order.to_bytes();
        let mut message = self.orders.get().await.split_to(bytes.len())?;
        message.copy_from_slice(&bytes);
        self.connection.send(message).timeout(self.patience).await.context("it took no order")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{Receiver, channel};
    use tokio_rdma::{Device, Listener};

    use super::*;
    use crate::compute::CpuKeeper;
    use crate::model::{self, PARAMETERS};

    const SOON: Duration = Duration::from_secs(20);

    fn cpu() -> Arc<CpuKeeper> {
        Arc::new(CpuKeeper)
    }

    /// A seat, and the worker in it, which the test plays.
    struct Played<G> {
        connection: Connection,
        orders: tokio_rdma::messages::Receiver,
        welcome: Welcome,
        commands: UnboundedSender<Command>,
        events: Receiver<Event<G>>,
    }

    impl<G: Send + 'static> Played<G> {
        async fn new(keeper: &Arc<impl Keeper<Gradient = G>>, patience: Duration) -> Self {
            let (connection, server) = connected().await;
            let (sender, mut events) = channel(8);
            let mut orders = connection.receiver(4, Order::MAX_LEN).unwrap();
            tokio::spawn(serve(7, server, terms(keeper, &connection, patience), sender));
            let Some(Event::Joined { worker: 7, greeting, commands }) = events.recv().await else {
                panic!("it did not join")
            };
            assert!(greeting.contains("paper"), "{greeting}");
            let Order::Welcome(welcome) = order(&mut orders).await else { panic!("no welcome") };
            Self { connection, orders, welcome, commands, events }
        }

        /// Has a ticket from here on.
        async fn with_work(keeper: &Arc<impl Keeper<Gradient = G>>) -> Self {
            let mut it = Self::new(keeper, SOON).await;
            let work = Work { ticket: TICKET, version: 3 };
            it.commands.send(Command::Work(work)).unwrap();
            assert_eq!(order(&mut it.orders).await, Order::Work(work));
            it
        }

        async fn push(&self, header: Header, loss: f32, gradient: &[f32], immediate: u32) {
            let mut bytes = vec![0; size_of_val(gradient) + size_of::<f32>()];
            crate::wire::floats_to_bytes(&[gradient, &[loss]].concat(), &mut bytes);
            let pd = self.connection.domain();
            let header = pd.register(header.to_bytes().to_vec()).unwrap();
            self.connection.write(header, &self.welcome.header).await.unwrap();
            let (body, to) = (pd.register(bytes).unwrap(), &self.welcome.gradient);
            self.connection.write_with_immediate(body, to, immediate).await.unwrap();
        }

        /// Why the seat was given up.
        async fn left(mut self) -> String {
            loop {
                let event = tokio::time::timeout(SOON, self.events.recv()).await.unwrap();
                if let Event::Left { worker: 7, why } = event.expect("it tells why") {
                    return why;
                }
            }
        }
    }

    /// Both ends: the worker's, and the one that the server gives a seat.
    async fn connected() -> (Connection, Connection) {
        let pd = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let listener = Listener::bind(&pd, "127.0.0.1:0").await.unwrap();
        let hello = Hello { computes_on: "paper".into() };
        let connecting = Connection::builder(&pd).private_data(hello.to_bytes()).connect(listener.local_address());
        tokio::try_join!(connecting, listener.accept()).unwrap()
    }

    fn terms<K: Keeper>(keeper: &Arc<K>, connection: &Connection, patience: Duration) -> Terms<K> {
        let region = || connection.domain().alloc(8).unwrap().expose(Access::REMOTE_READ).unwrap().remote();
        let published = Published { stamps: region(), copies: region() };
        Terms { keeper: keeper.clone(), seed: 1, batch: 32, published, patience }
    }

    async fn order(orders: &mut tokio_rdma::messages::Receiver) -> Order {
        Order::from_bytes(&orders.next().await.unwrap().unwrap()).unwrap()
    }

    /// More than the immediate holds.
    const TICKET: u64 = (1 << 32) + 5;

    fn header() -> Header {
        Header { ticket: TICKET, base: 3, samples: 32, pulled: 9, repeated: 1 }
    }

    #[tokio::test]
    async fn a_gradient_arrives_as_it_was_pushed() {
        let mut it = Played::with_work(&cpu()).await;
        let gradient: Vec<f32> = (0..PARAMETERS).map(|index| index as f32 / PARAMETERS as f32).collect();
        it.push(header(), 0.5, &gradient, TICKET as u32).await;
        let Some(Event::Delivered { worker: 7, header: arrived, loss, gradient: same }) = it.events.recv().await else {
            panic!("no gradient")
        };
        assert_eq!((arrived, loss, &same[..]), (header(), 0.5, &gradient[..]));
        drop(it.commands);
        assert_eq!(order(&mut it.orders).await, Order::Finish);
    }

    #[tokio::test]
    async fn who_comes_at_the_end_hears_that_it_is_over() {
        let (connection, server) = connected().await;
        let mut orders = connection.receiver(4, Order::MAX_LEN).unwrap();
        let (sender, events) = channel(8);
        drop(events);
        tokio::spawn(serve(7, server, terms(&cpu(), &connection, SOON), sender));
        assert!(matches!(order(&mut orders).await, Order::Welcome(_)));
        assert_eq!(order(&mut orders).await, Order::Finish);
    }

    #[test]
    fn an_honest_gradient_is_far_from_the_limits() {
        let digits = crate::digits::Digits::load().unwrap();
        let mut gradient = model::zeroed();
        for seed in 0..8 {
            let parameters = model::initial(seed);
            for sample in digits.training.chunks(100).map(|samples| &samples[..1]) {
                let loss = model::gradient(&parameters, sample.iter(), &mut gradient);
                let norm = gradient.iter().map(|it| f64::from(*it).powi(2)).sum::<f64>().sqrt();
                assert!(norm < MOST_NORM / 3.0 && loss < 100.0, "seed {seed}: {norm}, loss {loss}");
            }
        }
    }

    #[tokio::test]
    async fn what_is_wrong_ends_the_seat_and_is_said() {
        try_what_is_wrong(&cpu()).await;
    }

    /// On the stand-in for its driver where there is no GPU.
    #[cfg(feature = "cuda")]
    #[tokio::test]
    async fn what_is_wrong_is_noticed_by_a_gpu_as_well() {
        // Where a real driver would be found instead, it says so, and that one will do.
        let _ = fake_cuda::load();
        let gpu = crate::compute::Gpu::open(0).unwrap();
        try_what_is_wrong(&Arc::new(crate::compute::GpuKeeper::new(gpu))).await;
    }

    async fn try_what_is_wrong(keeper: &Arc<impl Keeper>) {
        let good = vec![0.0; PARAMETERS];
        let mut infinite = good.clone();
        infinite[100] = f32::INFINITY;
        let (mut nonsense, mut not) = (good.clone(), good.clone());
        (nonsense[100], not[100]) = (1e30, f32::NAN);
        for (header, loss, gradient, immediate, words) in [
            (header(), 0.5, &good[..], 6, "with the immediate 6"),
            (Header { ticket: 9, ..header() }, 0.5, &good, 5, "for ticket 9"),
            (Header { samples: 33, ..header() }, 0.5, &good, 5, "33 samples, the limit is 32"),
            (Header { samples: 0, ..header() }, 0.5, &good, 5, "0 samples"),
            (header(), f32::NAN, &good, 5, "a loss of NaN"),
            (header(), f32::MAX, &good, 5, "a loss of 340"),
            (header(), -0.5, &good, 5, "a loss of -0.5"),
            (header(), 0.5, &infinite, 5, "of the length inf"),
            (header(), 0.5, &nonsense, 5, "of the length 1000"),
            (header(), 0.5, &not, 5, "of the length NaN"),
            (header(), 0.5, &good[1..], 5, &format!("{} bytes instead of {GRADIENT_LEN}", GRADIENT_LEN - 4)),
        ] {
            let it = Played::with_work(keeper).await;
            it.push(header, loss, gradient, immediate).await;
            let why = it.left().await;
            assert!(why.contains(words), "{words}: {why}");
        }
    }

    #[tokio::test]
    async fn what_nobody_asked_for_ends_the_seat() {
        let it = Played::new(&cpu(), SOON).await;
        it.push(header(), 0.5, &[0.0; PARAMETERS], 5).await;
        assert!(it.left().await.contains("nobody asked for"));

        let it = Played::with_work(&cpu()).await;
        it.connection.send(it.connection.domain().register(vec![1]).unwrap()).await.unwrap();
        assert!(it.left().await.contains("a message instead of a gradient"));
    }

    #[tokio::test]
    async fn a_worker_that_is_late_or_gone_loses_its_seat() {
        let mut it = Played::new(&cpu(), Duration::from_millis(50)).await;
        it.commands.send(Command::Work(Work { ticket: 1, version: 0 })).unwrap();
        order(&mut it.orders).await;
        assert!(it.left().await.contains("no gradient within 50ms"));

        let it = Played::with_work(&cpu()).await;
        it.connection.close().await;
        assert!(it.left().await.contains("its connection ended"));
    }
}
