// amqp-connection-manager as NestJS uses it: node main.js AMQP-URL. A line for each step, in one order whoever answers.
"use strict";

const manager = require("amqp-connection-manager");

const PATIENCE_MS = 20000;
const REPLIES = "amq.rabbitmq.reply-to";
const TASKS = "manager.tasks";
const EVENTS = "manager.events";
const BEFORE = 5;
const MEANWHILE = 5;

const say = (...words) => console.log(words.join(" "));

/** Resolves when `condition` holds, which is asked after each message and event; the program ends when it never does. */
const waiting = [];
const changed = () => waiting.splice(0).forEach((look) => look());
const until = (condition) =>
  new Promise((done) => {
    const look = () => (condition() ? done() : waiting.push(look));
    look();
  });

setTimeout(() => {
  console.error("out of patience");
  process.exit(1);
}, 4 * PATIENCE_MS).unref();

const once = (emitter, name) => new Promise((done) => emitter.once(name, done));

async function serve(connection, heard) {
  const server = connection.createChannel({
    json: false,
    setup: async (channel) => {
      await channel.assertExchange(EVENTS, "topic", { durable: true });
      await channel.assertQueue(TASKS, { durable: true, maxPriority: 5 });
      await channel.bindQueue(TASKS, EVENTS, "task.*");
      await channel.prefetch(2, false);
      await channel.prefetch(10, true);
    },
  });
  await server.waitForConnect();
  await server.consume(TASKS, (message) => {
    const { replyTo, correlationId } = message.properties;
    if (replyTo) {
      server.sendToQueue(replyTo, Buffer.from(`${message.content} is done`), { correlationId });
    } else {
      heard.set(String(message.content), message.fields.routingKey);
    }
    server.ack(message);
    changed();
  });
  return server;
}

async function ask(connection, answers) {
  const client = connection.createChannel({
    json: false,
    setup: (channel) =>
      channel.consume(
        REPLIES,
        (message) => {
          answers.set(message.properties.correlationId, String(message.content));
          changed();
        },
        { noAck: true },
      ),
  });
  await client.waitForConnect();
  return client;
}

async function main(url) {
  const heard = new Map();
  const answers = new Map();
  const connection = manager.connect([url], { heartbeatIntervalInSeconds: 5, reconnectTimeInSeconds: 0.2 });
  await once(connection, "connect");
  say("connected", connection.isConnected());

  const server = await serve(connection, heard);
  const client = await ask(connection, answers);
  const publisher = connection.createChannel({ json: true, confirm: true, publishTimeout: PATIENCE_MS });
  await publisher.waitForConnect();
  say("channels", connection.channelCount);

  const rpc = async (id) => {
    await client.sendToQueue(TASKS, Buffer.from(id), { replyTo: REPLIES, correlationId: id });
    await until(() => answers.has(id));
    say("answered", answers.get(id));
  };
  await rpc("first");

  const confirmed = [];
  const publish = async (n) => {
    confirmed[n] = await publisher.publish(EVENTS, "task.new", { n }, { persistent: true, priority: n % 5 });
    changed();
  };
  for (let n = 0; n < BEFORE; n++) await publish(n);
  await until(() => heard.size === BEFORE);
  say("confirmed", confirmed.join(","), "heard", [...heard.keys()].sort().join(","));

  const left = once(connection, "disconnect");
  say("cut me off");
  const { err } = await left;
  say("disconnected", err.code, connection.isConnected());
  const meanwhile = Array.from({ length: MEANWHILE }, (_, n) => publish(BEFORE + n));
  say("kept back", publisher.queueLength());
  await Promise.all(meanwhile);
  await until(() => heard.size === BEFORE + MEANWHILE);
  say("confirmed", confirmed.join(","), "heard", [...heard.keys()].sort().join(","));
  await rpc("second");

  await publisher.addSetup((channel) => channel.assertQueue("manager.late", { exclusive: true }));
  await publisher.sendToQueue("manager.late", { late: true });
  const { messageCount, consumerCount } = await publisher.checkQueue("manager.late");
  say("late", messageCount, consumerCount);
  const got = await publisher.get("manager.late", { noAck: true });
  say("got", got.content, (await publisher.get("manager.late")) === false);

  await server.cancelAll();
  await publisher.publish(EVENTS, "task.unheard", "kept");
  say("kept", (await publisher.checkQueue(TASKS)).messageCount, (await publisher.purgeQueue(TASKS)).messageCount);
  await connection.close();
  say("closed", connection.isConnected());
  say("done");
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
