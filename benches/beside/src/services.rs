//! Messages through services of iceoryx2.

use anyhow::{Result, anyhow};
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;

use crate::member::{Check, Figures, Part, RECEIVERS, Root, Waiting, lead};

/// Returns figures at the root.
pub(crate) fn run(waiting: Waiting, part: &Part) -> Result<Option<Figures>> {
    set_log_level(LogLevel::Error);
    let node = NodeBuilder::new().create::<ipc::Service>().map_err(failed)?;
    let (receivers, name) = (usize::from(RECEIVERS), |what| format!("{}/{what}", part.round()));
    let publish_subscribe = |what| {
        // The sender waits where a buffer is full. By default, iceoryx2 overwrites the oldest message.
        let service = node.service_builder(&name(what).as_str().try_into().map_err(failed)?);
        let service = service.publish_subscribe::<[u8]>().enable_safe_overflow(false);
        let service = service.subscriber_max_buffer_size(part.in_flight).history_size(0);
        service.max_publishers(receivers).max_subscribers(receivers).open_or_create().map_err(failed)
    };
    let event = |what| {
        let service = node.service_builder(&name(what).as_str().try_into().map_err(failed)?).event();
        service.max_notifiers(receivers).max_listeners(receivers).open_or_create().map_err(failed)
    };
    let (messages, answers) = (publish_subscribe("messages")?, publish_subscribe("answers")?);
    let (message_is_here, answer_is_here) = (event("message-is-here")?, event("answer-is-here")?);
    let to = |service: &iceoryx2::service::port_factory::publish_subscribe::PortFactory<ipc::Service, [u8], ()>| {
        let publisher = service.publisher_builder().initial_max_slice_len(1024);
        publisher.backpressure_strategy(BackpressureStrategy::RetryUntilDelivered).create().map_err(failed)
    };
    let (of_root, of_receivers) = if part.rank == 0 {
        ((&messages, &message_is_here), (&answers, &answer_is_here))
    } else {
        ((&answers, &answer_is_here), (&messages, &message_is_here))
    };
    let mut ports = Ports {
        subscriber: of_receivers.0.subscriber_builder().create().map_err(failed)?,
        listener: of_receivers.1.listener_builder().create().map_err(failed)?,
        publisher: to(of_root.0)?,
        notifier: of_root.1.notifier_builder().create().map_err(failed)?,
        waiting,
    };
    if part.rank == 0 {
        let are_here = || {
            let ports = messages.dynamic_config().number_of_subscribers();
            let listeners = message_is_here.dynamic_config().number_of_listeners();
            ports.min(listeners).min(answers.dynamic_config().number_of_publishers())
        };
        while are_here() < receivers || answer_is_here.dynamic_config().number_of_notifiers() < receivers {
            waiting.pause();
        }
        return futures::executor::block_on(lead(ports, part)).map(Some);
    }
    let mut check = Check::new(part);
    while !check.is_done() {
        let is_answered = ports.receive(|message| check.take(message))?;
        if is_answered {
            ports.publish(&[1; 8])?;
        }
    }
    // The root still has to read the last answer.
    std::thread::sleep(std::time::Duration::from_millis(50));
    Ok(None)
}

/// A member's ends.
struct Ports {
    subscriber: Subscriber<ipc::Service, [u8], ()>,
    listener: Listener<ipc::Service>,
    publisher: Publisher<ipc::Service, [u8], ()>,
    notifier: Notifier<ipc::Service>,
    waiting: Waiting,
}

impl Ports {
    fn publish(&mut self, message: &[u8]) -> Result<()> {
        let sample = self.publisher.loan_slice_uninit(message.len()).map_err(failed)?;
        sample.write_from_slice(message).send().map_err(failed)?;
        if let Waiting::Sleep = self.waiting {
            self.notifier.notify().map_err(failed)?;
        }
        Ok(())
    }

    /// Waits for one message.
    fn receive<T>(&mut self, take: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        loop {
            if let Some(message) = self.subscriber.receive().map_err(failed)? {
                return take(message.payload());
            }
            match self.waiting {
                Waiting::Sleep => _ = self.listener.blocking_wait(|_| ()).map_err(failed)?,
                Waiting::Yield => self.waiting.pause(),
            }
        }
    }
}

impl Root for Ports {
    async fn send(&mut self, message: &[u8]) -> Result<()> {
        self.publish(message)
    }

    async fn answered(&mut self) -> Result<()> {
        (0..RECEIVERS).try_for_each(|_| self.receive(|_| Ok(())))
    }

    async fn close(self) -> Result<()> {
        Ok(())
    }
}

/// Some of its errors are no errors of `std`.
fn failed(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow!("iceoryx2: {error:?}")
}
