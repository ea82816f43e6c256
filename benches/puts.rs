//! Measures the latency of PUTs, and of the same hops over bare sockets. `puts.sh` starts it.
//!
//! ```text
//! puts relay 127.0.0.1:9001                                  # a second and a third process
//! puts relay 127.0.0.1:9000 --to 127.0.0.1:9001,127.0.0.1:9002
//! puts ping 127.0.0.1:9000                                   # through the first to the others, and back
//! puts put 127.0.0.1:8000                                    # a PUT to a storage_server
//! ```
//! A client sends one object at a time over one connection, and prints the median of the times until it has the answer,
//! in microseconds. Sockets block, so that a message wakes nothing but the thread that reads it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand};
use rdmc_benches::median;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Passes each object on, and answers when all have answered
    Relay {
        listen: SocketAddr,
        /// The processes behind this one.
        #[arg(long, value_delimiter = ',')]
        to: Vec<SocketAddr>,
        /// Bytes of an object.
        #[arg(long, default_value_t = OBJECT_LEN)]
        bytes: usize,
    },
    /// Sends objects to a relay
    Ping(Load),
    /// Sends objects to a storage server
    Put(Load),
}

#[derive(Args)]
struct Load {
    server: SocketAddr,
    /// Objects, the first tenth of which is not counted.
    #[arg(long, default_value_t = 2000)]
    count: usize,
    /// Bytes of an object.
    #[arg(long, default_value_t = OBJECT_LEN)]
    bytes: usize,
}

fn main() -> Result<()> {
    match Arguments::parse().role {
        Role::Relay { listen, to, bytes } => relay(listen, &to, bytes),
        Role::Ping(load) => {
            let object = vec![7; load.bytes];
            load.run(|stream, _| {
                stream.write_all(&object)?;
                Ok(stream.read_exact(&mut [0; ANSWER.len()])?)
            })
        }
        Role::Put(load) => {
            let mut answer = Vec::new();
            load.run(|stream, number| {
                let (name, server, len) = (number % NAMES, load.server, load.bytes);
                let head = format!("PUT /objects/{name} HTTP/1.1\r\nHost: {server}\r\nContent-Length: {len}\r\n\r\n");
                stream.write_all(&[head.into_bytes(), vec![7; len]].concat())?;
                answer.clear();
                while !answer.ends_with(b"\r\n\r\n") {
                    let mut part = [0; 1024];
                    let read = stream.read(&mut part)?;
                    ensure!(read > 0, "the server closed the connection");
                    answer.extend_from_slice(&part[..read]);
                }
                ensure!(answer.starts_with(b"HTTP/1.1 201 "), "{}", String::from_utf8_lossy(&answer));
                Ok(())
            })
        }
    }
}

/// Serves clients one after the other, until the process is ended.
fn relay(listen: SocketAddr, to: &[SocketAddr], bytes: usize) -> Result<()> {
    let listener = TcpListener::bind(listen)?;
    loop {
        let (mut client, _) = listener.accept()?;
        client.set_nodelay(true)?;
        let mut others = to.iter().map(connect).collect::<Result<Vec<_>>>()?;
        let mut object = vec![0; bytes];
        // Until the client is gone.
        while client.read_exact(&mut object).is_ok() {
            for other in &mut others {
                other.write_all(&object)?;
            }
            for other in &mut others {
                other.read_exact(&mut [0; ANSWER.len()])?;
            }
            client.write_all(&ANSWER)?;
        }
    }
}

impl Load {
    /// Sends the objects, and prints the median of their times.
    fn run(&self, mut send: impl FnMut(&mut TcpStream, usize) -> Result<()>) -> Result<()> {
        let mut stream = connect(&self.server)?;
        let mut times = Vec::new();
        for number in 0..self.count {
            let begun = Instant::now();
            send(&mut stream, number)?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        println!("{:.1}", median(&times[times.len() / 10..]));
        Ok(())
    }
}

/// Connects to a process that may still be starting.
fn connect(address: &SocketAddr) -> Result<TcpStream> {
    let begun = Instant::now();
    let stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(_) if begun.elapsed() < START_LIMIT => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error.into()),
        }
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Bytes of an object.
const OBJECT_LEN: usize = 1024;
/// Names of the objects, one after the other.
const NAMES: usize = 50;
/// What a relay answers.
const ANSWER: [u8; 8] = [1; 8];
const START_LIMIT: Duration = Duration::from_secs(30);
