//! What a peer of a test does, one step after the other.

use std::alloc::Layout;
use std::time::Duration;

use anyhow::{ensure, Result};
use async_rdma::{LocalMrReadAccess, LocalMrWriteAccess, MrAccess, Rdma, RdmaBuilder};
use clap::ValueEnum;

use crate::settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// Receive a message and send it back, with its immediate if it has one.
    Echo,
    /// Send a message, and another with an immediate.
    Send,
    /// Request a region of the peer, write it, read it back, and release it.
    Request,
    /// Lend a region, and wait for the message that says that it was used.
    Lend,
    /// Receive a region that the peer lends, read it and write its bytes back, each plus one; say so in a message.
    Borrow,
    /// As `borrow`, and then give the region back.
    Return,
    /// Receive a region, wait until its time is over, and fail to write it.
    BorrowLate,
    /// Request a region, write it, and give it back to the peer.
    Fill,
    /// Write a requested region with an immediate, and wait for a write of the peer with one.
    Notify,
    /// Fail to get a region.
    Denied,
    /// Without the library's protocol, which is then switched off for all steps: receive 64 bytes with an immediate, and send
    /// them back with the next one.
    RawEcho,
    /// Do nothing more.
    Stay,
}

/// Of regions, in bytes.
const SIZE: usize = 4096;

/// Of messages without the protocol, in bytes.
const RAW_SIZE: usize = 64;

/// What the steps need.
pub fn builder(steps: &[Step]) -> Result<RdmaBuilder> {
    Ok(settings::builder()?.set_raw(steps.contains(&Step::RawEcho)))
}

pub async fn run(rdma: &Rdma, steps: &[Step]) -> Result<()> {
    for step in steps {
        carry_out(rdma, *step).await?;
        println!("done: {step:?}");
    }
    Ok(())
}

fn layout(size: usize) -> Result<Layout> {
    Ok(Layout::from_size_align(size, 64)?)
}

/// A byte for each place, other ones for each `seed`.
fn pattern(seed: u8) -> Vec<u8> {
    (0..SIZE).map(|at| (at * 7 / 3) as u8 ^ seed).collect()
}

async fn say(rdma: &Rdma, words: &[u8], immediate: Option<u32>) -> Result<()> {
    let mut message = rdma.alloc_local_mr(layout(words.len())?)?;
    message.as_mut_slice().copy_from_slice(words);
    match immediate {
        Some(immediate) => rdma.send_with_imm(&message, immediate).await?,
        None => rdma.send(&message).await?,
    }
    Ok(())
}

async fn carry_out(rdma: &Rdma, step: Step) -> Result<()> {
    match step {
        Step::Echo => {
            let (message, immediate) = rdma.receive_with_imm().await?;
            match immediate {
                Some(immediate) => rdma.send_with_imm(&message, immediate).await?,
                None => rdma.send(&message).await?,
            }
        }
        Step::Send => {
            say(rdma, b"from the peer", None).await?;
            say(rdma, b"with an immediate", Some(0x0102_0304)).await?;
        }
        Step::Request => {
            let mut remote = rdma.request_remote_mr(layout(SIZE)?).await?;
            let mut local = rdma.alloc_local_mr(layout(SIZE)?)?;
            local.as_mut_slice().copy_from_slice(&pattern(1));
            rdma.write(&local, &mut remote).await?;
            let mut back = rdma.alloc_local_mr(layout(SIZE)?)?;
            rdma.read(&mut back, &remote).await?;
            ensure!(back.as_slice()[..] == pattern(1)[..], "other bytes came back");
        }
        Step::Lend => {
            let mut local = rdma.alloc_local_mr(layout(SIZE)?)?;
            local.as_mut_slice().copy_from_slice(&pattern(2));
            rdma.send_local_mr(local).await?;
            let used = rdma.receive().await?;
            ensure!(used.as_slice()[..] == *b"used", "{:?}", used.as_slice()[..].to_vec());
        }
        Step::Borrow | Step::Return => {
            let mut remote = rdma.receive_remote_mr().await?;
            let mut local = rdma.alloc_local_mr(layout(remote.length())?)?;
            rdma.read(&mut local, &remote).await?;
            local.as_mut_slice().iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            rdma.write(&local, &mut remote).await?;
            say(rdma, b"used", None).await?;
            if step == Step::Return {
                rdma.send_remote_mr(remote).await?;
            }
        }
        Step::BorrowLate => {
            let mut remote = rdma.receive_remote_mr().await?;
            let local = rdma.alloc_local_mr(layout(remote.length())?)?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let late = rdma.write(&local, &mut remote).await;
            ensure!(late.is_err(), "it could be written");
            println!("refused: {late:?}");
        }
        Step::Fill => {
            let mut remote = rdma.request_remote_mr(layout(SIZE)?).await?;
            let mut local = rdma.alloc_local_mr(layout(SIZE)?)?;
            local.as_mut_slice().copy_from_slice(&pattern(6));
            rdma.write(&local, &mut remote).await?;
            rdma.send_remote_mr(remote).await?;
        }
        Step::Notify => {
            let mut remote = rdma.request_remote_mr(layout(SIZE)?).await?;
            let local = rdma.alloc_local_mr(layout(SIZE)?)?;
            rdma.write_with_imm(&local, &mut remote, 0x0506_0708).await?;
            let immediate = rdma.receive_write_imm().await?;
            ensure!(immediate == 0x0a0b_0c0d, "{immediate:#x}");
        }
        Step::Denied => {
            rdma.receive().await?;
            let denied = rdma.request_remote_mr(layout(SIZE)?).await;
            ensure!(denied.is_err(), "it got a region");
            println!("refused: {:?}", denied.err());
        }
        Step::RawEcho => {
            let (message, immediate) = rdma.receive_raw_with_imm(layout(RAW_SIZE)?).await?;
            ensure!(immediate == Some(0x0102_0304), "{immediate:x?}");
            rdma.send_raw_with_imm(&message, 0x0102_0305).await?;
        }
        Step::Stay => std::future::pending().await,
    }
    Ok(())
}
