//! Two ends of a connection, over each transport there is.

use std::io::Write as _;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio_rdma::soft::{self, Faults, LinkPolicy, default_limits};
use tokio_rdma::{
    Access, Address, Buffer, BufferPool, CompletionMode, Connection, ConnectionBuilder, Device, DeviceBuilder,
    ExposedRegion, Listener, ProtectionDomain, RemoteRegion,
};

use super::data::fill;

/// Where listeners bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressKind {
    Tcp,
    Unix,
    /// An address of the NIC that `TOKIO_RDMA_TEST_NIC=device@address` names.
    Nic,
}

/// What a case runs on.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub device: fn() -> DeviceBuilder,
    pub address: AddressKind,
    /// What the software device may use; `None` for a NIC.
    pub links: Option<LinkPolicy>,
    pub mode: CompletionMode,
    pub workers: usize,
}

/// The device and the address of the NIC to test with, where there is one: `cargo xtask guest test` names it.
pub fn nic() -> Option<(String, String)> {
    let named = std::env::var("TOKIO_RDMA_TEST_NIC").ok()?;
    named.split_once('@').map(|(device, address)| (device.to_owned(), address.to_owned()))
}

fn nic_device() -> DeviceBuilder {
    Device::builder(&nic().expect("cases for a NIC run only where there is one").0)
}

fn sockets() -> DeviceBuilder {
    Device::builder("soft0").links(LinkPolicy::Sockets)
}

fn shm() -> DeviceBuilder {
    Device::builder("soft0").links(LinkPolicy::SharedMemory)
}

/// As if the other end were in another process.
fn soft_apart() -> DeviceBuilder {
    soft::device(default_limits(), Some(Faults::seeded(0).keep_apart())).links(LinkPolicy::Sockets)
}

impl Setup {
    pub const SOFT_TCP: Self = Self {
        device: sockets,
        address: AddressKind::Tcp,
        links: Some(LinkPolicy::Sockets),
        mode: CompletionMode::Adaptive { spin: CompletionMode::DEFAULT_SPIN },
        workers: 2,
    };
    /// An RDMA NIC, by way of libibverbs.
    pub const NIC: Self = Self { device: nic_device, address: AddressKind::Nic, links: None, ..Self::SOFT_TCP };
    pub const SOFT_TCP_APART: Self = Self { device: soft_apart, ..Self::SOFT_TCP };
    pub const SOFT_UNIX: Self = Self { address: AddressKind::Unix, ..Self::SOFT_TCP };
    /// Shared memory, between ends that find each other through TCP.
    pub const SHM_TCP: Self = Self { device: shm, links: Some(LinkPolicy::SharedMemory), ..Self::SOFT_TCP };
    pub const SHM_UNIX: Self = Self { address: AddressKind::Unix, ..Self::SHM_TCP };

    pub const fn mode(self, mode: CompletionMode) -> Self {
        Self { mode, ..self }
    }

    /// One thread for everything, as in `#[tokio::main(flavor = "current_thread")]`.
    pub const fn single_threaded(self) -> Self {
        Self { workers: 0, ..self }
    }

    pub fn runtime(&self) -> Runtime {
        let mut builder = match self.workers {
            0 => Builder::new_current_thread(),
            _ => Builder::new_multi_thread(),
        };
        builder.worker_threads(self.workers.max(1)).enable_all().build().unwrap()
    }
}

/// Makes devices and connections of a [`Setup`].
pub struct Rig {
    pub setup: Setup,
    directory: TempDir,
    sockets: AtomicU32,
}

/// The usual settings.
pub fn usual(settings: ConnectionBuilder) -> ConnectionBuilder {
    settings
}

impl Rig {
    pub fn new(setup: Setup) -> Self {
        Self { setup, directory: tempfile::tempdir().unwrap(), sockets: AtomicU32::new(0) }
    }

    pub fn device(&self) -> Device {
        self.open((self.setup.device)())
    }

    /// Opens a device of other making in this rig's completion mode.
    pub fn open(&self, builder: DeviceBuilder) -> Device {
        let builder = match self.setup.links {
            Some(links) => builder.links(links),
            None => builder,
        };
        builder.completion_mode(self.setup.mode).open().unwrap()
    }

    pub fn domain(&self) -> ProtectionDomain {
        self.device().alloc_pd().unwrap()
    }

    pub fn on_nic(&self) -> bool {
        self.setup.address == AddressKind::Nic
    }

    /// Whether this case does not apply to an RDMA NIC; says so, past what libtest captures.
    pub fn skipped_on_nic(&self, why: &str) -> bool {
        if self.on_nic() {
            let _ = writeln!(std::io::stderr(), "skipped: {why}");
        }
        self.on_nic()
    }

    /// A fresh address to bind.
    pub fn address(&self) -> Address {
        match self.setup.address {
            AddressKind::Tcp => "127.0.0.1:0".parse().unwrap(),
            AddressKind::Unix => self.path().into(),
            AddressKind::Nic => format!("{}:0", nic().unwrap().1).parse().unwrap(),
        }
    }

    /// A path nothing is at.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(self.sockets.fetch_add(1, Ordering::Relaxed).to_string())
    }

    pub async fn listener(&self, domain: &ProtectionDomain) -> Listener {
        Listener::bind(domain, self.address()).await.unwrap()
    }

    /// Two connected ends, each with a device of its own, with the default settings.
    pub async fn pair(&self) -> Pair {
        self.pair_with(usual, usual).await
    }

    /// The same settings at both ends.
    pub async fn pair_of(&self, settings: impl Fn(ConnectionBuilder) -> ConnectionBuilder) -> Pair {
        self.pair_with(&settings, &settings).await
    }

    pub async fn pair_with(
        &self,
        client: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder,
        server: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder,
    ) -> Pair {
        self.connect_with((&self.domain(), client), (&self.domain(), server)).await
    }

    /// Connects two domains.
    pub async fn connect(&self, client: &ProtectionDomain, server: &ProtectionDomain) -> Pair {
        self.connect_with((client, usual), (server, usual)).await
    }

    pub async fn connect_with(
        &self,
        (client, of_client): (&ProtectionDomain, impl FnOnce(ConnectionBuilder) -> ConnectionBuilder),
        (server, of_server): (&ProtectionDomain, impl FnOnce(ConnectionBuilder) -> ConnectionBuilder),
    ) -> Pair {
        let listener = Listener::builder(server).connections(of_server).bind(self.address()).await.unwrap();
        let connecting = of_client(Connection::builder(client)).connect(listener.local_address());
        let (connected, accepted) = tokio::join!(connecting, listener.accept());
        Pair { client: End::new(client, connected.unwrap()), server: End::new(server, accepted.unwrap()) }
    }
}

/// Both ends of a connection.
pub struct Pair {
    pub client: End,
    pub server: End,
}

impl Pair {
    /// Each end with its peer.
    pub fn directions(&self) -> [(&End, &End); 2] {
        [(&self.client, &self.server), (&self.server, &self.client)]
    }
}

/// One end of a connection, with the domain that its buffers come from.
#[derive(Clone)]
pub struct End {
    pub domain: ProtectionDomain,
    pub connection: Connection,
}

impl Deref for End {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl End {
    pub fn new(domain: &ProtectionDomain, connection: Connection) -> Self {
        Self { domain: domain.clone(), connection }
    }

    /// A zeroed buffer.
    pub fn buffer(&self, len: usize) -> Buffer {
        self.domain.alloc(len).unwrap()
    }

    /// A buffer with the pattern of this seed.
    pub fn filled(&self, len: usize, seed: u64) -> Buffer {
        let mut buffer = self.buffer(len);
        fill(&mut buffer, seed);
        buffer
    }

    /// A buffer without bytes.
    pub fn empty(&self) -> Buffer {
        self.buffer(1).split_to(0).unwrap()
    }

    pub fn pool(&self, len: usize, count: usize) -> BufferPool {
        BufferPool::new(&self.domain, len, count).unwrap()
    }

    /// Zeroed memory that the peer may use in every way.
    pub fn exposed(&self, len: usize) -> ExposedRegion {
        self.buffer(len).expose(Access::all()).unwrap()
    }

    /// Memory with the pattern of this seed.
    pub fn exposed_filled(&self, len: usize, seed: u64) -> ExposedRegion {
        self.filled(len, seed).expose(Access::all()).unwrap()
    }

    /// Sends a small message with this number, and waits for it to be delivered.
    pub async fn send_number(&self, number: u64) {
        self.send(self.domain.register(number.to_le_bytes().to_vec()).unwrap()).await.unwrap();
    }

    /// Receives what [`send_number`](Self::send_number) sent.
    pub async fn receive_number(&self) -> u64 {
        let received = self.receive(self.buffer(8)).await.unwrap();
        u64::from_le_bytes(received.message().try_into().unwrap())
    }

    /// Reads the whole region.
    pub async fn fetch(&self, remote: &RemoteRegion) -> Vec<u8> {
        self.read(self.buffer(remote.len() as usize), remote).await.unwrap().to_vec()
    }
}

/// What is in exposed memory right now.
pub fn contents(region: &ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.copy_to(0, &mut bytes).unwrap();
    bytes
}
