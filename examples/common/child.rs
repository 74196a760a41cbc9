//! The same program once more, as the server of the process that starts it.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio_rdma::Address;

/// What a server prints before its address.
const LISTENING: &str = "listening on ";

/// Tells who started this process, or who reads along, where it listens.
pub fn announce(address: &Address) -> Result<()> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{LISTENING}{address}").and_then(|()| stdout.flush()).context("print")
}

/// Resolves when standard input ends: whoever started this process has let it go, or is gone, however that came about.
pub async fn let_go() {
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    // A thread that the runtime does not wait for when everything else is done.
    std::thread::spawn(move || {
        let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
        drop(sender);
    });
    let _ = receiver.await;
}

/// A server process. Killed when dropped.
pub struct Server {
    process: Child,
    /// Its end tells the server that it is not needed any more, also when this process is killed.
    stdin: Option<ChildStdin>,
    /// Kept, since a server that cannot print fails.
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Server {
    /// Starts this program again with these arguments, and waits for the address that it announces.
    pub async fn start(
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        limit: Duration,
    ) -> Result<(Self, Address)> {
        let program = std::env::current_exe().context("find this program's own path")?;
        let mut command = Command::new(program);
        // Otherwise a server would outlive a client that fails before it connects.
        command.args(arguments).kill_on_drop(true).stdin(Stdio::piped()).stdout(Stdio::piped());

        let mut process = command.spawn().context("start the server process")?;
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().context("the server's standard output")?).lines();
        let mut server = Self { process, stdin, stdout };
        let reading = tokio::time::timeout(limit, server.line()).await;
        let line = reading.map_err(|_| anyhow!("the server process did not listen within {limit:?}"))??;
        match line.as_deref().and_then(|line| line.strip_prefix(LISTENING)) {
            Some(address) => Ok((server, address.parse()?)),
            None => bail!("the server process did not start listening; see its message above"),
        }
    }

    /// The next line that it prints.
    pub async fn line(&mut self) -> Result<Option<String>> {
        self.stdout.next_line().await.context("read what the server prints")
    }

    /// Lets the server end.
    pub fn let_go(&mut self) {
        drop(self.stdin.take());
    }

    /// Lets the server end, and adds what becomes of it to what became of the client.
    pub async fn finish<T>(mut self, outcome: Result<T>, limit: Duration) -> Result<T> {
        self.let_go();
        // After a failure only a moment: a server that died is collected at once, and one that hangs will not end by itself.
        let patience = if outcome.is_ok() { limit } else { limit.min(Duration::from_secs(1)) };
        let Ok(status) = tokio::time::timeout(patience, self.process.wait()).await else {
            self.process.kill().await.context("end the server process")?;
            let hung = format!("the server process did not end within {patience:?} and was killed");
            return Err(match outcome {
                Ok(_) => anyhow!("all steps succeeded, but {hung}"),
                Err(error) => error.context(hung),
            });
        };
        let status = status.context("wait for the server process")?;
        match outcome {
            _ if status.success() => outcome,
            Ok(_) => Err(anyhow!("all steps succeeded here, but the server process ended with {status}")),
            Err(error) => Err(error.context(format!("the server process ended with {status}"))),
        }
    }
}

/// Bounds a step, and names it in its error.
pub async fn within<T>(limit: Duration, step: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result.with_context(|| step.to_owned()),
        Err(_) => bail!("{step}: not finished within {limit:?}; is the other process alive? --timeout sets the limit"),
    }
}
