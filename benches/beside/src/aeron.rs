//! Messages through Aeron, by one media driver for all members.

use std::ffi::CString;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rusteron_client::{Aeron, AeronExclusivePublication, AeronOfferError, AeronSubscription, Handlers};
use rusteron_media_driver::bindings::aeron_threading_mode_enum;
use rusteron_media_driver::testing::EmbeddedDriver;

use crate::member::{Check, Figures, Part, RECEIVERS, Root, Waiting, lead};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Medium {
    /// Logs in memory that all members map.
    Ipc,
    /// Datagrams over the loopback, one to each receiver.
    Udp,
}

/// Runs the media driver until standard input ends.
pub(crate) fn drive(waiting: Waiting, part: &Part) -> Result<()> {
    let directory = directory(part)?;
    let _driver = EmbeddedDriver::launch_with(|context| {
        context.set_dir(&directory)?;
        // One thread: there are more processes than cores already.
        context.set_threading_mode(aeron_threading_mode_enum::AERON_THREADING_MODE_SHARED)?;
        let (strategy, arguments) = match waiting {
            Waiting::Sleep => (c"sleep-ns", c"1us"),
            Waiting::Yield => (c"yield", c""),
        };
        context.set_shared_idle_strategy_init_args(arguments)?;
        context.set_shared_idle_strategy(strategy)?;
        Ok(())
    })?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Returns figures at the root.
pub(crate) fn run(medium: Medium, waiting: Waiting, part: &Part) -> Result<Option<Figures>> {
    let aeron = connect(part, waiting)?;
    let answers = part.ports[usize::from(RECEIVERS) + 1];
    let (messages, answers) = match medium {
        Medium::Ipc => ("aeron:ipc?term-length=1m".to_owned(), "aeron:ipc?term-length=1m".to_owned()),
        Medium::Udp => {
            let messages = format!("aeron:udp?control=127.0.0.1:{}|control-mode=dynamic", part.ports[0]);
            (messages, format!("aeron:udp?endpoint=127.0.0.1:{answers}|term-length=1m"))
        }
    };
    if part.rank == 0 {
        let messages = match medium {
            Medium::Ipc => messages,
            // The slowest receiver sets the pace. Without that, a slow one loses messages.
            Medium::Udp => format!("{messages}|fc=min,g:/{RECEIVERS}|term-length=1m"),
        };
        let messages = publish(&aeron, &messages, MESSAGES)?;
        let answers = subscribe(&aeron, &answers, ANSWERS)?;
        while answers.image_count()? < RECEIVERS.into() || !messages.is_connected() {
            waiting.pause();
        }
        return futures::executor::block_on(lead(Streams { messages, answers, waiting }, part)).map(Some);
    }
    let messages = match medium {
        Medium::Ipc => messages,
        Medium::Udp => format!("{messages}|endpoint=127.0.0.1:{}", part.ports[usize::from(part.rank)]),
    };
    // In this order: the root sends when it can be answered.
    let messages = subscribe(&aeron, &messages, MESSAGES)?;
    let answers = publish(&aeron, &answers, ANSWERS)?;
    let mut check = Check::new(part);
    while !check.is_done() {
        poll(&messages, waiting, |message| {
            if check.take(message)? {
                offer(&answers, waiting, &[1; 8])?;
            }
            Ok(())
        })?;
    }
    // What this process has published is only sent while it runs.
    std::thread::sleep(Duration::from_millis(200));
    Ok(None)
}

struct Streams {
    messages: AeronExclusivePublication,
    answers: AeronSubscription,
    waiting: Waiting,
}

impl Root for Streams {
    async fn send(&mut self, message: &[u8]) -> Result<()> {
        offer(&self.messages, self.waiting, message)
    }

    async fn answered(&mut self) -> Result<()> {
        let mut answers = 0;
        while answers < RECEIVERS {
            poll(&self.answers, self.waiting, |_| {
                answers += 1;
                Ok(())
            })?;
        }
        Ok(())
    }

    async fn close(self) -> Result<()> {
        Ok(())
    }
}

/// Waits for the driver, then becomes its client.
fn connect(part: &Part, waiting: Waiting) -> Result<Aeron> {
    let directory = directory(part)?;
    while !PathBuf::from(directory.to_str()?).join("cnc.dat").exists() {
        waiting.pause();
    }
    Aeron::connect_dir(directory.to_str()?).context("the media driver does not answer")
}

fn publish(aeron: &Aeron, channel: &str, stream: i32) -> Result<AeronExclusivePublication> {
    let channel = CString::new(channel)?;
    Ok(aeron.async_add_exclusive_publication(&channel, stream)?.poll_blocking(FORMED_WITHIN)?)
}

fn subscribe(aeron: &Aeron, channel: &str, stream: i32) -> Result<AeronSubscription> {
    let adding = aeron.async_add_subscription(&CString::new(channel)?, stream, Handlers::NONE, Handlers::NONE)?;
    Ok(adding.poll_blocking(FORMED_WITHIN)?)
}

/// Takes the messages that are here; waits a moment if there are none.
fn poll(from: &AeronSubscription, waiting: Waiting, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut taken = Ok(());
    let count = from.poll_fn(
        |message, _| {
            if taken.is_ok() {
                taken = take(message);
            }
        },
        64,
    )?;
    if count == 0 {
        waiting.pause();
    }
    taken
}

fn offer(to: &AeronExclusivePublication, waiting: Waiting, message: &[u8]) -> Result<()> {
    loop {
        match to.offer(message) {
            Ok(_) => return Ok(()),
            Err(AeronOfferError::BackPressured | AeronOfferError::AdminAction) => waiting.pause(),
            Err(error) => return Err(error).context("Aeron does not take a message"),
        }
    }
}

/// Where the driver and its clients meet.
fn directory(part: &Part) -> Result<CString> {
    Ok(CString::new(format!("/dev/shm/{}", part.round()))?)
}

const MESSAGES: i32 = 1;
const ANSWERS: i32 = 2;
const FORMED_WITHIN: Duration = Duration::from_secs(10);
