// Queues: their messages, and operations on them.
import {html, useState} from "./vendor/htm.js";
import {get, may, post, session, useAsked} from "./api.js";
import {Act, Body, Dialog, List, number, octets, period} from "./parts.js";

export function Queues() {
  const [looked, look] = useState(null), [into, publish] = useState(null);
  const words = row => ({protocol: row.protocol, virtual_host: row.virtual_host, kind: row.kind, queue: row.queue, exact: true});
  return html`<h2>Queues</h2>
    <section><${List} path="queues" caption="Queues and durable subscriptions" orders=${{Queue: "name", Messages: "messages"}} keyed=${row => `${row.protocol} ${row.virtual_host} ${row.kind} ${row.queue}`}
      filters=${[["queue", "Name (* is any text)"], ["protocol", "Protocol"], ["empty", "Empty"], ["sort", "Order"]]} columns=${again => [
      ["Queue", row => row.queue, "text"], ["Virtual host", row => `${row.protocol} ${row.virtual_host}`], ["Messages", row => number(row.messages), "number"], ["Size", row => octets(row.messages_bytes), "number"],
      ["Unacknowledged", row => number(row.unacknowledged), "number"], ["In /s", row => number(row.in_per_sec), "number"], ["Out /s", row => number(row.out_per_sec), "number"],
      ["Consumers", row => row.messages && !row.consumers ? html`<span class="warn">none</span>` : number(row.consumers), "number"], ["Durable", row => row.durable ? "yes" : "no"], ["Arguments", row => Object.keys(row.arguments).length ? JSON.stringify(row.arguments) : "–", "text"], ["Idle", row => period(row.idle_secs), "number"],
      ["", row => html`<span class="acts">
        ${row.kind === "queue" && html`<${Act} label="Peek" name=${row.queue} act=${async () => { look({row, ...await post("queues/peek", {protocol: row.protocol, virtual_host: row.virtual_host, queue: row.queue})}); }} />`}
        ${row.kind === "queue" && may() && !session.virtual_hosts && html`<button aria-label=${`Publish to ${row.queue}`} onClick=${() => publish(row)}>Publish</button>`}
        <${Act} label="Purge" name=${row.queue} sure=${`Purge the ${row.messages} ready messages of ${row.queue}?`} act=${async () => { const told = await post("queues/purge", words(row)); await again(); return `${told.messages} messages purged`; }} />
        <${Act} label="Delete" name=${row.queue} sure=${`Delete ${row.queue} with its messages?`} act=${async () => { const told = await post("queues/remove", words(row)); await again(); return told.in_use ? "not deleted: in use" : `${told.removed} deleted`; }} /></span>`]]} /></section>
    ${looked && html`<${Dialog} title=${`First messages of ${looked.row.queue}`} close=${() => look(null)}>
      <p class="soft">${number(looked.messages)} messages wait; showing them does not consume them.</p>
      ${looked.shown.map(one => html`<section><b>${one.address}</b> <span class="soft">from ${one.sender.client || one.sender.user || one.sender.endpoint || "unknown"}, ${octets(one.body_bytes)}${one.content_type ? `, ${one.content_type}` : ""}</span>
        <${Body} of=${one} />${Object.keys(one.headers).length > 0 && html`<pre class="soft">${JSON.stringify(one.headers)}</pre>`}</section>`)}
      ${!looked.shown.length && html`<p>No message is ready.</p>`}<//>`}
    ${into && html`<${Dialog} title=${`Publish to ${into.queue}`} close=${() => publish(null)}><${PublishTo} row=${into} /><//>`}`;
}

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
