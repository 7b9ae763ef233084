// Pages of single objects. Each has a row of a list, whose columns it shows, and what else belongs to the object.
import {html, useEffect, useRef} from "./vendor/htm.js";
import {everything, get, session, useAsked} from "./api.js";
import {Facts, Go, List, Table, number, bytes, period, wanted, worded} from "./parts.js";
import {clientOf, connectionColumns, DeadLetterList, LimitTable, sessionColumns} from "./broker.js";
import {Bindings, exchangeColumns} from "./names.js";
import {Chart, endpointColumns, Outboxes, routeColumns} from "./overview.js";
import {placeOf, queueColumns} from "./queues.js";

const SAMPLES_MAX = 1800;  // An hour, at one each two seconds.

// Charts of the numbers of a row: of the last hour where the gateway has stored them, otherwise since the page was opened.
// `charts` are [title, unit, [[line, name in the stored history, function from row to number, colour]]].
function OwnHistory({row, charts}) {
  const seen = useRef([]), last = useRef(null);
  if (last.current !== row) {
    last.current = row;
    seen.current = [...seen.current, [Date.now() / 1000, row]].slice(-SAMPLES_MAX);
  }
  const stored = row.history;
  if (stored) return html`<div class="columns">${charts.map(([title, unit, lines]) => html`<${Chart} title=${title} unit=${unit} stepSecs=${stored.step_secs} until=${stored.until} lines=${lines.map(([name, what, , colour]) => [name, stored.values[what], colour])} />`)}</div>`;
  const times = seen.current.map(([time]) => time);
  return html`<div class="columns">${charts.map(([title, unit, lines]) => html`<${Chart} title=${title} unit=${unit} times=${times} lines=${lines.map(([name, , value, colour]) => [name, seen.current.map(([, one]) => value(one) ?? 0), colour])} />`)}</div>
    <p class="soft">This chart begins when the page was opened. The gateway stores the last hour only of the first 500 queues and clients, after their first minute.</p>`;
}

// Charts of the last hour, which the gateway stores.
function Hour({kind, name, charts}) {
  const {document: found} = useAsked(() => get("rates", {kind, name}), [kind, name]);
  const rows = found?.items.filter(one => one.name === name) ?? [];
  if (!rows.length) return found && html`<p class="soft">The gateway has no history of this object yet.</p>`;
  return html`<div class="columns">${charts.map(([title, lines]) => html`<${Chart} title=${title} stepSecs=${rows[0].step_secs} until=${rows[0].until} lines=${lines.map(([what, label, colour]) => [label, rows.find(one => one.what === what)?.values ?? [], colour])} />`)}</div>`;
}
const MESSAGES = ["Messages", [["in", "in", "--flow"], ["out", "out", "--good"]]];

// Parts of the pages.

const Consumers = more => html`<section><${List} path="consumers" caption="Consumers" ...${more} keyed=${row => Object.values(row).join(" ")} columns=${() => [
  ["Queue", row => html`<${Go} at="queue" words=${placeOf(row)}>${row.queue}<//>`, "text"], ["Client", row => html`<${Go} at="client" words=${clientOf(row)}>${row.client || row.address}<//>`, "text"], ["User", row => row.user || "–"], ["Channel", row => row.channel, "number"],
  ["Tag", row => row.tag, "text"], ["Prefetch", row => number(row.prefetch), "number"], ["Unacknowledged", row => number(row.unacknowledged), "number"], ["Acknowledges", row => row.acknowledges ? "yes" : "no"]]} /></section>`;

function Session({client}) {
  const {document: found, again} = useAsked(() => get(`sessions/${encodeURIComponent(client)}`).catch(() => false), [client]);
  if (!found) return html`<section><h3>Session</h3><p class="soft">${found === false ? "This client has no session." : "…"}</p></section>`;
  const columns = sessionColumns(again);
  return html`<section><h3>Session</h3><${FactsOf} columns=${columns} row=${found} more=${[["Ends in", found.in_use ? null : found.expires_secs === null ? "never" : period(found.expires_secs)]]} /><p class="acts">${columns.at(-1)[1](found)}</p></section>
    <section><${Table} caption=${`Subscriptions: ${found.filters.length}`} rows=${found.filters} keyed=${one => one.filter} empty="No subscriptions." columns=${[
      ["Topic filter", one => html`<code>${one.filter}</code>`, "text"], ["QoS", one => one.qos, "number"], ["No local", one => one.no_local ? "yes" : "no"], ["Retain as published", one => one.retain_as_published ? "yes" : "no"],
      ["Retain handling", one => one.retain_handling, "number"], ["Identifier", one => one.identifier || "–", "number"]]} /></section>`;
}

function RoutesOf({endpoint}) {
  const {document: routes, again} = useAsked(() => everything("routes"), [endpoint]);
  const rows = routes?.filter(one => one.source === endpoint || one.target === endpoint);
  return html`<section><${Table} caption=${`Routes: ${rows?.length ?? "…"}`} rows=${rows} keyed=${row => row.name} empty="No route uses this." columns=${routeColumns(again)} /></section>`;
}

const OutboxesOf = ({state, word, name}) => html`<section><${Outboxes} rows=${state?.outboxes.filter(one => one[word] === name)} /></section>`;

const FactsOf = ({columns, row, more = []}) => html`<${Facts} pairs=${[...columns.slice(1).filter(([head]) => head).map(([head, cell]) => [head, cell(row)]), ...more]} />`;

const limit = (used, most, shown = number) => `${shown(used)} of ${shown(most)}`;
const endpoint = {
  path: "endpoints", columns: endpointColumns, title: row => row.name,
  more: row => [["Address", row.place || "–"], ["Messages in", number(row.messages_in)], ["Messages out", number(row.messages_out)], ["Bytes in", bytes(row.bytes_in)], ["Bytes out", bytes(row.bytes_out)]],
  history: row => html`<${Hour} kind=${row.kind} name=${row.name} charts=${[MESSAGES, ["Outcomes", [["settled", "settled", "--flow"], ["refused", "refused", "--bad"]]]]} />`,
};

// By the name in the address: view that it belongs to, list with its row, columns of that, further facts, history, and other parts, which are given the row and the gateway's state.
export const OBJECTS = {
  client: {
    noun: "Client", view: "connections", path: "connections", words: {rates: true, history: true}, columns: connectionColumns, title: row => row.client || row.address,
    missing: "This client is not connected.",
    more: row => [["TLS", row.tls ? "yes" : "no"], ["Channels", row.channel_max ? limit(row.channels, row.channel_max) : null], ["Frame maximum", row.frame_max ? bytes(row.frame_max) : null], ["Heartbeat", row.heartbeat_secs ? period(row.heartbeat_secs) : null]],
    history: row => html`<${OwnHistory} row=${row} charts=${[["Bytes", "per second", [["in", "bytes_in", one => one.bytes_in_per_sec, "--flow"], ["out", "bytes_out", one => one.bytes_out_per_sec, "--good"]]],
      ["Messages in flight", "count", [["unsettled", "unsettled", one => one.unsettled, "--flow"], ["unacknowledged", "unacknowledged", one => one.unacknowledged, "--good"]]]]} />`,
    parts: row => row.protocol === "mqtt" ? null : html`<${Consumers} words=${{address: row.address}} without=${["Client", "User"]} empty="This client consumes no queue." />
      ${row.protocol === "amqp091" && html`<section><h3>Client properties</h3>${Object.keys(row.client_properties).length ? html`<${Facts} pairs=${worded(Object.entries(row.client_properties))} />` : html`<p class="soft">The client has sent none.</p>`}</section>`}`,
    always: words => words.protocol === "mqtt" && !session.virtual_hosts && html`<${Session} client=${words.client} />`,
  },
  queue: {
    noun: "Queue", view: "queues", path: "queues", words: {exact: true, history: true}, columns: queueColumns, title: row => row.queue, missing: "This queue does not exist.",
    more: row => [["Message limit", limit(row.messages, row.messages_max)], ["Size limit", limit(row.messages_bytes, row.messages_bytes_max, bytes)], ["Belongs to a connection", row.temporary ? "yes" : "no"]],
    history: row => html`<${OwnHistory} row=${row} charts=${[["Messages waiting", "count", [["ready", "ready", one => one.messages, "--flow"], ["unacknowledged", "unacknowledged", one => one.unacknowledged, "--warn"]]],
      ["Messages", "per second", [["in", "in", one => one.in_per_sec, "--flow"], ["out", "out", one => one.out_per_sec, "--good"]]]]} />`,
    parts: row => html`<${Consumers} words=${{protocol: row.protocol, virtual_host: row.virtual_host, queue: row.queue}} without=${["Queue"]} empty=${row.messages ? "No consumers: the messages of this queue wait." : "No consumers."} />
      ${row.protocol === "amqp091" && html`<section><${Bindings} caption="Bindings to this queue" words=${{virtual_host: row.virtual_host, destination: row.queue}} without=${["Virtual host", "Destination", "Kind"]} empty="Only the default exchange leads to this queue." /></section>`}`,
  },
  exchange: {
    noun: "Exchange", view: "exchanges", path: "exchanges", words: {exact: true}, columns: exchangeColumns, title: row => row.name, missing: "This exchange does not exist.",
    history: () => html`<p class="soft">The gateway does not count messages of exchanges. The pages of the queues below show the messages that arrive.</p>`,
    parts: row => html`<section><${Bindings} caption="Bindings from this exchange" words=${{virtual_host: row.virtual_host, source: row.name}} without=${["Exchange", "Virtual host"]} empty="Nothing is bound to this exchange." /></section>`,
  },
  route: {
    noun: "Route", view: "routes", path: "routes", columns: routeColumns, title: row => row.name, missing: "This route does not exist.",
    more: row => [["Condition", row.when], ["Settles", row.settle], ["Paused", row.paused ? `yes, ${number(row.held)} held` : "no"], ["Duplicates", number(row.duplicates)]],
    history: row => html`<${Hour} kind="route" name=${row.name} charts=${[["Messages", [["in", "matched", "--flow"], ["out", "delivered", "--good"]]], ["Failures", [["refused", "failed and dropped", "--bad"], ["dead_letters", "dead letters", "--warn"]]]]} />`,
    parts: (row, state) => html`<${OutboxesOf} state=${state} word="route" name=${row.name} /><section><${DeadLetterList} words=${{route: row.name}} without=${["Route"]} /></section>`,
  },
  link: {
    ...endpoint, noun: "Link", view: "links", words: {kind: "link"}, missing: "This link does not exist.",
    parts: (row, state) => html`<${RoutesOf} endpoint=${row.name} /><${OutboxesOf} state=${state} word="link" name=${row.name} />`,
  },
  listener: {
    ...endpoint, noun: "Listener", view: "overview", words: {kind: "listener"}, missing: "This listener does not exist.",
    parts: row => html`<${RoutesOf} endpoint=${row.name} /><section><${LimitTable} of=${row.name} /></section>
      <section><${List} path="connections" caption="Connected clients" empty="No client is connected." words=${{endpoint: row.name, rates: true}} without=${["Listener"]} keyed=${one => `${one.address} ${one.endpoint}`} columns=${connectionColumns} /></section>`,
  },
};

// Page of the object that the words of the address name.
export function Single({kind, state}) {
  const is = OBJECTS[kind], words = wanted();
  const {document: found, error, again} = useAsked(() => get(is.path, {...is.words, ...words}), []);
  const fitting = found?.items.filter(one => Object.entries(words).every(([word, value]) => String(one[word]) === value)), row = fitting?.length === 1 ? fitting[0] : null;
  const columns = is.columns(again), acts = columns.at(-1)[0] === "" && columns.at(-1)[1];
  const name = row ? is.title(row) : words.name ?? words.queue ?? words.client ?? words.address ?? "";
  useEffect(() => { document.title = `gateway: ${is.noun} ${name}`; }, [name]);
  return html`<h2>${is.noun} ${name}</h2>
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    ${!found && !error && html`<p class="soft">…</p>`}
    ${found && !row && html`<section><h3>State</h3><p>${is.missing}</p></section>`}
    ${row && html`<section><h3>State</h3><${FactsOf} columns=${columns} row=${row} more=${is.more?.(row)} />${acts && html`<p class="acts">${acts(row)}</p>`}</section>
      ${is.history(row)}${is.parts(row, state)}`}
    ${is.always?.(words)}`;
}
