//! What people see of a training: a bar on a terminal, lines elsewhere.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Lines of a whole training where nobody asked for another number.
const LINES: u64 = 10;

/// How often the text beside the bar changes; the bar itself is drawn no more often than a terminal is looked at.
const REFRESH: Duration = Duration::from_millis(100);

/// How far a training is.
#[derive(Clone, Copy)]
pub struct State {
    pub step: u64,
    /// Tickets applied.
    pub applied: u64,
    pub loss: f32,
    pub workers: usize,
    /// Bytes of gradients and of parameters so far, of this process's life.
    pub moved: u64,
}

pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    /// Of this process's life.
    first_step: Option<u64>,
    /// Steps between two lines.
    every: Option<u64>,
    /// Tickets between two lines, and how many are to be applied at the next one.
    tickets: (u64, u64),
    refreshed: Instant,
}

impl Progress {
    /// `every` counts steps between lines; without it there are few.
    pub fn new(tickets: u64, applied: u64, every: Option<u64>) -> Self {
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} batches  {msg}");
        let bar = ProgressBar::new(tickets).with_position(applied);
        let bar = style.map_or(bar.clone(), |style| bar.with_style(style));
        let apart = (tickets / LINES).max(1);
        Self {
            bar,
            started: Instant::now(),
            first_step: None,
            every,
            tickets: (apart, applied + apart),
            refreshed: Instant::now(),
        }
    }

    /// The clock starts when there is work.
    pub fn begin(&mut self, step: u64) {
        if self.first_step.is_none() {
            (self.first_step, self.started) = (Some(step), Instant::now());
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn step(&mut self, state: State) -> Result<()> {
        let State { step, applied, loss, workers, .. } = state;
        self.bar.set_position(applied);
        if !self.bar.is_hidden() && self.refreshed.elapsed() >= REFRESH {
            self.refreshed = Instant::now();
            self.bar.set_message(format!("step {step}  loss {loss:.3}  {workers} workers  {}", self.speed(state)));
        }
        let line = match self.every {
            Some(every) => step % every == 0,
            None => self.bar.is_hidden() && applied >= self.tickets.1,
        };
        if line {
            self.tickets.1 = applied + self.tickets.0;
            self.say(&format!("step {step}, loss {loss:.3}, {workers} workers, {}", self.speed(state)))?;
        }
        Ok(())
    }

    fn speed(&self, state: State) -> String {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let steps = (state.step - self.first_step.unwrap_or(state.step)) as f64 / seconds;
        format!("{steps:.0} steps/s, {}/s", HumanBytes((state.moved as f64 / seconds) as u64))
    }

    /// A line above the bar. Fails when nobody reads any more: whoever started this is gone.
    pub fn say(&self, line: &str) -> Result<()> {
        self.bar.suspend(|| say(line))
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// Prints a line, and at once also where standard output is a pipe.
pub fn say(line: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context("print")
}
