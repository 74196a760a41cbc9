//! The service, as a compiler of .proto files would write it:
//!
//! ```proto
//! message Text { bytes bytes = 1; }
//! service Echo { rpc Echo(Text) returns (Text); }
//! ```

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use hyper::http::{self, uri::PathAndQuery};
use tonic::body::Body;
use tonic::client::Grpc as Client;
use tonic::server::{Grpc as Server, NamedService, UnaryService};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

const ECHO: &str = "/rdma.Echo/Echo";

/// A request, and an answer.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Text {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
}

/// Answers with the request.
#[derive(Clone)]
pub struct Echo;

impl UnaryService<Text> for Echo {
    type Response = Text;
    type Future = Ready<Result<Response<Text>, Status>>;

    fn call(&mut self, request: Request<Text>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl NamedService for Echo {
    const NAME: &'static str = "rdma.Echo";
}

impl tower::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            if request.uri().path() != ECHO {
                return Ok(Status::unimplemented("there is only Echo").into_http());
            }
            Ok(Server::new(ProstCodec::<Text, Text>::default()).unary(Echo, request).await)
        })
    }
}

/// The other end.
pub struct EchoClient {
    inner: Client<Channel>,
}

impl EchoClient {
    pub fn new(channel: Channel) -> Self {
        Self { inner: Client::new(channel) }
    }

    pub async fn echo(&mut self, text: Text) -> Result<Text, Status> {
        self.inner.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = ProstCodec::<Text, Text>::default();
        let answer = self.inner.unary(Request::new(text), PathAndQuery::from_static(ECHO), codec).await?;
        Ok(answer.into_inner())
    }
}
