//! A server and a client in one process: a message there and back, then a read of the server's memory
//! in which the server's program takes no part.

use tokio_rdma::{Access, Connection, Device, Listener, RemoteRegion, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::open_default()?;
    let pd = device.alloc_pd()?;
    let listener = Listener::bind(&pd, device.local_address(0)?).await?;
    let address = listener.local_address().clone();

    let server = tokio::spawn(async move {
        let connection = listener.accept().await?;
        let pd = connection.domain();

        let request = connection.receive(pd.alloc(64)?).await?;
        println!("server: {:?}", request.message().escape_ascii().to_string());

        let memory = pd.register(b"read without asking".to_vec())?.expose(Access::REMOTE_READ)?;
        connection.send(pd.register(memory.remote().to_bytes().to_vec())?).await?;

        println!("server: {}", connection.closed().await);
        Result::Ok(())
    });

    let client = Connection::connect(&pd, &address).await?;
    let mut answer = client.receive(pd.alloc(64)?);
    answer.try_post()?; // a place for the answer, before the server is asked for one
    client.send(pd.register(b"what may I read?".to_vec())?).await?;

    let region = RemoteRegion::from_bytes(answer.await?.message())?;
    let bytes = client.read(pd.alloc(region.len() as usize)?, &region).await?;
    println!("client: {:?}, over {} on {}", bytes.escape_ascii().to_string(), client.link(), client.device().name());

    client.close().await;
    server.await.expect("the server does not panic")
}
