//! rumqttc, MQTT 3.1.1: rumqttc-program PORT. A line for each step, in one order whoever answers.

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rumqttc::{Client, Connection, Event, Incoming, LastWill, MqttOptions, Outgoing, Publish, QoS};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(50); // until it connects again
const TOPIC: &str = "rumqttc/plant";
const MANY: usize = 30;
const LEVELS: [QoS; 3] = [QoS::AtMostOnce, QoS::AtLeastOnce, QoS::ExactlyOnce];

/// What the thread that drives a connection tells.
enum Told {
    Connected { session: bool },
    Heard(Publish),
    Granted(String),
    Settled,
    Lost,
}

struct Peer {
    client: Client,
    told: Receiver<Told>,
}

impl Peer {
    fn connect(port: u16, id: &str) -> Outcome<Peer> {
        let (client, mut connection) = Client::new(options(port, id), 100);
        let (tell, told) = channel();
        let name = id.to_owned();
        thread::spawn(move || {
            for one in connection.iter() {
                let news = match one {
                    Ok(Event::Incoming(packet)) => match packet {
                        Incoming::ConnAck(answer) => Told::Connected {
                            session: answer.session_present,
                        },
                        Incoming::Publish(message) => Told::Heard(message),
                        Incoming::SubAck(answer) => {
                            Told::Granted(format!("{:?}", answer.return_codes))
                        }
                        Incoming::UnsubAck(_) => Told::Granted("nothing".into()),
                        Incoming::PubAck(_) | Incoming::PubComp(_) => Told::Settled,
                        _ => continue,
                    },
                    Ok(Event::Outgoing(Outgoing::Disconnect)) => return,
                    Ok(Event::Outgoing(_)) => continue,
                    Err(error) => {
                        eprintln!("{name}: {error}");
                        thread::sleep(PAUSE);
                        Told::Lost
                    }
                };
                if tell.send(news).is_err() {
                    return;
                }
            }
        });
        let peer = Peer { client, told };
        println!("connected {id} {}", peer.session()?);
        Ok(peer)
    }

    /// The next of the news that `wanted` makes something of; others are passed over.
    fn wait<T>(&self, wanted: impl Fn(Told) -> Option<T>) -> Outcome<T> {
        loop {
            match self.told.recv_timeout(PATIENCE) {
                Ok(news) => {
                    if let Some(found) = wanted(news) {
                        return Ok(found);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err("out of patience".into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn session(&self) -> Outcome<bool> {
        self.wait(|news| match news {
            Told::Connected { session } => Some(session),
            _ => None,
        })
    }

    fn subscribe(&self, filter: String, qos: QoS) -> Outcome<()> {
        self.client.subscribe(filter, qos)?;
        println!("granted {}", self.granted()?);
        Ok(())
    }

    fn granted(&self) -> Outcome<String> {
        self.wait(|news| match news {
            Told::Granted(codes) => Some(codes),
            _ => None,
        })
    }

    fn heard(&self) -> Outcome<String> {
        self.wait(|news| match news {
            Told::Heard(message) => Some(shown(&message)),
            _ => None,
        })
    }

    /// Returns when it is settled, if it is of a kind that is.
    fn publish(&self, topic: &str, qos: QoS, retain: bool, body: &str) -> Outcome<()> {
        self.client.publish(topic, qos, retain, body)?;
        if qos == QoS::AtMostOnce {
            return Ok(());
        }
        self.wait(|news| matches!(news, Told::Settled).then_some(()))
    }
}

fn options(port: u16, id: &str) -> MqttOptions {
    let mut made = MqttOptions::new(id, "127.0.0.1", port);
    made.set_keep_alive(Duration::from_secs(30))
        .set_clean_session(false);
    made
}

fn shown(message: &Publish) -> String {
    let body = String::from_utf8_lossy(&message.payload);
    let retained = if message.retain { " retained" } else { "" };
    format!("{} {} {body}{retained}", message.topic, message.qos as u8)
}

fn published(sender: &Peer, receiver: &Peer) -> Outcome<()> {
    for granted in LEVELS {
        receiver.subscribe(format!("{TOPIC}/{}/+", granted as u8), granted)?;
        for qos in LEVELS {
            sender.publish(
                &format!("{TOPIC}/{}/{}", granted as u8, qos as u8),
                qos,
                false,
                "grün",
            )?;
            println!("heard {}", receiver.heard()?);
        }
    }
    receiver.client.unsubscribe(format!("{TOPIC}/0/+"))?;
    println!("granted {}", receiver.granted()?);
    Ok(())
}

fn retained(sender: &Peer, receiver: &Peer) -> Outcome<()> {
    let topic = format!("{TOPIC}/state");
    for state in ["on", "off"] {
        sender.publish(&topic, QoS::AtLeastOnce, true, state)?;
        receiver.subscribe(topic.clone(), QoS::ExactlyOnce)?;
        println!("retained {}", receiver.heard()?);
        receiver.client.unsubscribe(topic.clone())?;
        println!("granted {}", receiver.granted()?);
    }
    sender.publish(&topic, QoS::AtLeastOnce, true, "")?;
    receiver.subscribe(topic.clone(), QoS::AtLeastOnce)?;
    sender.publish(&topic, QoS::AtLeastOnce, false, "alone")?;
    println!("cleared {}", receiver.heard()?);
    Ok(())
}

/// A connection that ends without a goodbye.
fn willed(port: u16, receiver: &Peer) -> Outcome<()> {
    let topic = format!("{TOPIC}/will");
    receiver.subscribe(topic.clone(), QoS::ExactlyOnce)?;
    let mut mortal = options(port, "rumqttc-mortal");
    mortal.set_clean_session(true);
    mortal.set_last_will(LastWill::new(topic, "gone", QoS::ExactlyOnce, false));
    let (_client, mut connection): (Client, Connection) = Client::new(mortal, 10);
    match connection.recv_timeout(PATIENCE) {
        Ok(Ok(Event::Incoming(Incoming::ConnAck(_)))) => drop(connection),
        other => return Err(format!("not connected: {other:?}").into()),
    }
    println!("will {}", receiver.heard()?);
    Ok(())
}

/// All connections are lost while messages are under way: none of them is. Who takes them has never had QoS 2, of which
/// this client forgets what it has received: it ends every later connection at the PUBREL, on Mosquitto as well.
fn cut_off(port: u16, sender: &Peer) -> Outcome<()> {
    let receiver = Peer::connect(port, "rumqttc-late")?;
    receiver.subscribe(format!("{TOPIC}/all/+"), QoS::AtLeastOnce)?;
    for number in 0..MANY {
        if number == MANY / 2 {
            println!("cut me off");
        }
        let qos = LEVELS[1 + number % 2];
        sender
            .client
            .publish(format!("{TOPIC}/all/{number:02}"), qos, false, "kept")?;
    }
    sender.wait(|news| matches!(news, Told::Lost).then_some(()))?;
    println!("back {}", sender.session()?);
    let mut found = BTreeSet::new(); // it hands on what is sent again
    while found.len() < MANY {
        found.insert(receiver.heard()?);
    }
    println!("all {found:?}");
    Ok(())
}

fn all(port: u16) -> Outcome<()> {
    let sender = Peer::connect(port, "rumqttc-sender")?;
    let receiver = Peer::connect(port, "rumqttc-receiver")?;
    published(&sender, &receiver)?;
    retained(&sender, &receiver)?;
    willed(port, &receiver)?;
    cut_off(port, &sender)?;
    println!("done");
    Ok(())
}

fn main() -> Outcome<()> {
    all(std::env::args().nth(1).ok_or("PORT is missing")?.parse()?)
}
