//! Messages of eight bytes in both directions, in memory that is loaned for them.

use anyhow::{Result, anyhow, ensure};
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;

pub enum Side {
    Server,
    Client,
}

pub struct Link {
    publisher: Publisher<ipc::Service, u64, ()>,
    subscriber: Subscriber<ipc::Service, u64, ()>,
    _node: Node<ipc::Service>,
}

impl Link {
    pub fn open(address: &str, side: Side) -> Result<Self> {
        let node = NodeBuilder::new().create::<ipc::Service>()?;
        let service = |direction: &str| {
            let name = format!("{address}/{direction}").as_str().try_into()?;
            // One of each, which is what the pattern needs and the least work for a message.
            let settings = node.service_builder(&name).publish_subscribe::<u64>().max_publishers(1).max_subscribers(1);
            anyhow::Ok(settings.open_or_create()?)
        };
        let (there, back) = (service("there")?, service("back")?);
        let (out, into) = match side {
            Side::Server => (back, there),
            Side::Client => (there, back),
        };
        let subscriber = into.subscriber_builder().create()?;
        let publisher = out.publisher_builder().create()?;
        Ok(Self { publisher, subscriber, _node: node })
    }

    pub fn send(&self, message: u64) -> Result<()> {
        let sample = self.publisher.loan_uninit()?.write_payload(message);
        let receivers = sample.send().map_err(|error| anyhow!("send: {error:?}"))?;
        ensure!(receivers == 1, "{receivers} subscribers got the message instead of one");
        Ok(())
    }

    /// Polls until a message is there.
    pub fn receive(&self) -> Result<u64> {
        loop {
            if let Some(sample) = self.subscriber.receive()? {
                return Ok(*sample);
            }
            std::hint::spin_loop();
        }
    }
}
