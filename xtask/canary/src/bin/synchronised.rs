//! Correct use of every way to share that the crate relies on: the thread sanitizer must stay silent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, mpsc};
use std::thread;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn main() {
    for _ in 0..50 {
        contended_mutex();
        channel();
        ping_pong();
    }
    static ONCE: OnceLock<Vec<u64>> = OnceLock::new();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(ONCE.get_or_init(|| vec![1, 2, 3])[1], 2));
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(sockets());
    runtime.block_on(tasks());
}

/// The mutex is contended, and the last owner of the `Arc` frees what the others wrote.
fn contended_mutex() {
    let shared = Arc::new((Mutex::new(vec![0_u64; 4]), AtomicU64::new(0)));
    let threads: Vec<_> = (0..4)
        .map(|i| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for _ in 0..200 {
                    shared.0.lock().unwrap()[i] += 1;
                    shared.0.lock().unwrap()[0] += 1;
                    shared.1.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    drop(shared);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn channel() {
    let (sender, receiver) = mpsc::channel::<Box<u64>>();
    let thread = thread::spawn(move || receiver.iter().map(|value| *value).sum::<u64>());
    (0..1000).for_each(|value| sender.send(Box::new(value)).unwrap());
    drop(sender);
    assert_eq!(thread.join().unwrap(), 499_500);
}

fn ping_pong() {
    fn play(table: &(Mutex<u64>, Condvar), turn: u64) {
        for round in 0..100 {
            let mut ball = table.0.lock().unwrap();
            while *ball != round * 2 + turn {
                ball = table.1.wait(ball).unwrap();
            }
            *ball += 1;
            table.1.notify_one();
        }
    }
    let table = Arc::new((Mutex::new(0), Condvar::new()));
    let other = Arc::clone(&table);
    let thread = thread::spawn(move || play(&other, 0));
    play(&table, 1);
    thread.join().unwrap();
}

/// Readiness goes through the kernel, which the sanitizer does not see.
async fn sockets() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let clients: Vec<_> = (0..20)
        .map(|_| {
            tokio::spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let mut bytes = vec![1; 1000];
                for _ in 0..50 {
                    stream.write_all(&bytes).await.unwrap();
                    stream.read_exact(&mut bytes).await.unwrap();
                }
            })
        })
        .collect();
    for _ in 0..20 {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let (mut reader, mut writer) = stream.split();
            tokio::io::copy(&mut reader, &mut writer).await.unwrap();
        });
    }
    for client in clients {
        client.await.unwrap();
    }
}

async fn tasks() {
    let (sender, mut receiver) = tokio::sync::mpsc::channel::<Box<u64>>(4);
    for task in 0..8 {
        let sender = sender.clone();
        tokio::spawn(async move {
            for value in 0..100 {
                sender.send(Box::new(task * value)).await.unwrap();
                tokio::time::sleep(std::time::Duration::from_micros(10)).await;
            }
        });
    }
    drop(sender);
    let mut sum = 0;
    while let Some(value) = receiver.recv().await {
        sum += *value;
    }
    assert_eq!(sum, (0..8).sum::<u64>() * (0..100).sum::<u64>());
}
