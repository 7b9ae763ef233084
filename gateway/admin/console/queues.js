// Queues: their messages, and operations on them.
import {html, useState} from "./vendor/htm.js";
import {get, may, post, session, useAsked} from "./api.js";
import {Act, Dialog, Go, List, MessageShown, Table, number, bytes, period} from "./parts.js";

export const placeOf = row => ({protocol: row.protocol, virtual_host: row.virtual_host, kind: row.kind, queue: row.queue});
export const queueColumns = again => [
  ["Queue", row => html`<${Go} at="queue" words=${placeOf(row)}>${row.queue}<//>`, "text"], ["Virtual host", row => `${row.protocol} ${row.virtual_host}`], ["Messages", row => number(row.messages), "number"], ["Size", row => bytes(row.messages_bytes), "number"],
  ["Unacknowledged", row => number(row.unacknowledged), "number"], ["In /s", row => number(row.in_per_sec), "number"], ["Out /s", row => number(row.out_per_sec), "number"],
  ["Consumers", row => row.messages && !row.consumers ? html`<span class="warn">none</span>` : number(row.consumers), "number"], ["Durable", row => row.durable ? "yes" : "no"], ["Arguments", row => Object.keys(row.arguments).length ? JSON.stringify(row.arguments) : "–", "text"], ["Idle", row => period(row.idle_secs), "number"],
  ["", row => html`<${Acts} row=${row} again=${again} />`]];

export function Queues() {
  return html`<h2>Queues</h2>
    <section><${List} path="queues" caption="Queues and durable subscriptions" empty="No queues." orders=${{Queue: "name", Messages: "messages"}} keyed=${row => Object.values(placeOf(row)).join(" ")}
      filters=${[["queue", "Name (* is any text)"], ["protocol", "Protocol"], ["empty", "Empty"], ["sort", "Order"]]} columns=${queueColumns} /></section>`;
}

// What can be done with a queue, and the dialogs of that.
function Acts({row, again}) {
  const [looked, look] = useState(null), [publishes, publish] = useState(false);
  const words = {...placeOf(row), exact: true}, {protocol, virtual_host, queue} = row;
  return html`<span class="acts">
    ${row.kind === "queue" && html`<${Act} label="Peek" name=${queue} act=${async () => { look(await post("queues/peek", {protocol, virtual_host, queue})); }} />`}
    ${row.kind === "queue" && may() && !session.virtual_hosts && html`<button aria-label=${`Publish to ${queue}`} onClick=${() => publish(true)}>Publish</button>`}
    <${Act} label="Purge" name=${queue} sure=${`Purge the ${row.messages} ready messages of ${queue}?`} act=${async () => { const told = await post("queues/purge", words); await again(); return `${told.messages} messages purged`; }} />
    <${Act} label="Delete" name=${queue} sure=${`Delete ${queue} with its messages?`} act=${async () => { const told = await post("queues/remove", words); await again(); return told.in_use ? "not deleted: in use" : `${told.removed} deleted`; }} /></span>
    ${looked && html`<${Dialog} title=${`First messages of ${queue}`} close=${() => look(null)}>
      <p class="soft">Messages waiting: ${number(looked.messages)}. Showing them does not consume them. Click a row to open it.</p>
      <${Table} caption=${`Messages shown: ${looked.shown.length}`} rows=${looked.shown} keyed=${one => looked.shown.indexOf(one)} empty="No message is ready." open=${one => html`<${MessageShown} of=${one} />`} columns=${messageColumns} /><//>`}
    ${publishes && html`<${Dialog} title=${`Publish to ${queue}`} close=${() => publish(false)}><${PublishTo} row=${row} /><//>`}`;
}

const cut = one => one.body_encoding === "withheld" ? "(withheld)" : one.body.length > 80 ? `${one.body.slice(0, 80)}…` : one.body;
export const messageColumns = [["Address", one => one.address, "text"], ["From", one => one.sender.client || one.sender.user || one.sender.endpoint || "unknown", "text"], ["Size", one => bytes(one.body_bytes), "number"], ["Body", one => html`<code>${cut(one)}</code>`, "text"]];

function PublishTo({row}) {
  const {document: endpoints} = useAsked(() => get("endpoints", {count: 1000}), [], false);
  const [told, tell] = useState("");
  const known = endpoints?.items.filter(one => one.kind === "listener" && one.protocol === row.protocol) || [];
  const send = async event => {
    event.preventDefault();
    const {endpoint, body} = Object.fromEntries(new FormData(event.target));
    const address = row.protocol === "amqp091" ? {exchange: "", routing_key: row.queue} : {service: "queue", destination: row.queue};
    try {
      const found = await post("publish", {endpoint, body, ...address});
      tell(`${found.outcome} ${found.text}`);
    } catch (error) { tell(error.message); }
  };
  return html`<form onSubmit=${send}><label>Listener<select name="endpoint">${known.map(one => html`<option>${one.name}</option>`)}</select></label>
    <label>Body<textarea name="body"></textarea></label><button class="act">Publish</button> <span role="status">${told}</span></form>`;
}
