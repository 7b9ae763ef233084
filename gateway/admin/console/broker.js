// Connections, sessions, limits, dead letters, the journal.
import {html, useState} from "./vendor/htm.js";
import {everything, get, post, useAsked} from "./api.js";
import {Act, Dialog, Go, List, MessageShown, Table, moment, number, bytes, period, said} from "./parts.js";

// A client of MQTT is known by its identifier, which it has again after it has reconnected; another one by its address.
export const clientOf = row => row.protocol === "mqtt" && row.client ? {client: row.client, protocol: row.protocol} : {address: row.address, endpoint: row.endpoint};
export const connectionColumns = again => [
  ["Client", row => html`<${Go} at="client" words=${clientOf(row)}>${row.client || row.address}<//>`, "text"], ["User", row => row.user || "–"], ["Address", row => row.address], ["Listener", row => row.endpoint], ["Protocol", row => `${row.protocol} ${row.version}`],
  ["Virtual host", row => row.virtual_host || "–"], ["Since", row => moment(row.since)], ["In /s", row => bytes(row.bytes_in_per_sec), "number"], ["Out /s", row => bytes(row.bytes_out_per_sec), "number"], ["Unsettled", row => number(row.unsettled), "number"], ["Unacknowledged", row => number(row.unacknowledged), "number"],
  ["", row => html`<${Act} label="Disconnect" name=${row.client || row.address} sure=${`Disconnect ${row.client || row.address}?`} act=${async () => { const told = await post("connections/disconnect", {address: row.address, endpoint: row.endpoint}); await again(); return `${told.disconnected} disconnected`; }} />`]];

export function Connections() {
  return html`<h2>Connections</h2><section><${List} path="connections" caption="Connected clients" empty="No client is connected." words=${{rates: true}} orders=${{Client: "client", User: "user", Address: "address", Listener: "endpoint", Since: "since", "In /s": "bytes_in", "Out /s": "bytes_out"}} keyed=${row => `${row.address} ${row.endpoint}`}
    filters=${[["client", "Client"], ["user", "User"], ["address", "Address"], ["endpoint", "Listener"], ["protocol", "Protocol"]]} columns=${connectionColumns} /></section>`;
}

export const sessionColumns = again => [
  ["Client", row => html`<${Go} at="client" words=${{client: row.client, protocol: "mqtt"}}>${row.client}<//>`, "text"], ["User", row => row.user || "–"], ["Connected", row => row.in_use ? "yes" : "no"], ["Disconnected for", row => period(row.idle_secs), "number"], ["Subscriptions", row => number(row.subscriptions), "number"],
  ["Waiting", row => number(row.waiting), "number"], ["In flight", row => number(row.in_flight), "number"],
  ["", row => html`<${Act} label="Delete" name=${row.client} sure=${`Delete the session of ${row.client} with its messages?`} act=${async () => { const told = await post("sessions/remove", {client: row.client, exact: true, in_use: true}); await again(); return `${told.removed} deleted`; }} />`]];

export function Sessions() {
  return html`<h2>Sessions</h2><section><${List} path="sessions" caption="MQTT sessions" empty="No sessions." keyed=${row => row.client} filters=${[["client", "Client (* is any text)"], ["user", "User"], ["in_use", "Connected"]]} columns=${sessionColumns} /></section>`;
}

const share = row => row.limit ? Math.min(row.used / row.limit, 1) : 0;
const sized = row => /bytes/.test(row.name) ? bytes : number;
const limitColumns = [
  ["Limit", row => row.name], ["Scope", row => row.of || "the gateway", "text"], ["Used", row => sized(row)(row.used), "number"], ["Maximum", row => row.limit ? sized(row)(row.limit) : "none", "number"],
  ["Share", row => html`<span class="bar ${share(row) > .8 ? "bad" : ""}"><span style=${{width: `${100 * share(row)}%`}}></span></span>`], ["", row => row.limit ? `${Math.round(100 * share(row))} %` : "", "number"]];

export const Limits = () => html`<h2>Limits</h2><section><${List} path="limits" caption="Use of limits" words=${{count: 1000}} keyed=${row => `${row.name} ${row.of}`} columns=${() => limitColumns} /></section>`;

// Limits of one listener.
export function LimitTable({of}) {
  const {document: rows} = useAsked(() => everything("limits"), [of]);
  return html`<${Table} caption="Use of limits" rows=${rows?.filter(row => row.of === of)} keyed=${row => row.name} empty="No limits apply only to this listener." columns=${limitColumns} />`;
}

const reasonOf = row => row.text ? `${row.reason}: ${row.text}` : row.reason;
const waiting = told => told.waiting.length ? `, ${told.waiting.length} being redriven` : "";
const redriven = told => `${told.redriven} redriven` + (told.left.length ? `, ${told.left.length} refused by their targets: ${told.left[0].text || told.left[0].reason}` : "") + waiting(told);

export function DeadLetters() {
  let again = async () => {};
  return html`<h2>Dead letters</h2>
    <section><${DeadLetterList} choose=${one => { again = one; }} filters=${[["route", "Route"]]}><p class="acts"><${Act} label="Redrive all" sure="Publish all dead letters again?" act=${async () => { const told = await post("dead-letters/redrive", {all: true}); await again(); return redriven(told); }} />
      <${Act} label="Purge all" sure="Delete all dead letters?" act=${async () => { const told = await post("dead-letters/purge", {all: true}); await again(); return `${told.purged} deleted` + waiting(told); }} /></p><//></section>`;
}

export function DeadLetterList(more) {
  const [shown, show] = useState(null);
  return html`<${List} path="dead-letters" caption="Dead letters, newest first" keyed=${row => row.id} empty="No dead letters." ...${more} columns=${again => [
    ["Time", row => moment(row.time)], ["Route", row => row.route ? html`<${Go} at="route" words=${{name: row.route}}>${row.route}<//>` : "–"], ["Address", row => row.address, "text"], ["Reason", reasonOf, "text"], ["Size", row => bytes(row.body_bytes), "number"],
    ["", row => html`<span class="acts"><button aria-label=${`Show ${row.id}`} onClick=${async () => { try { show(await get(`dead-letters/${row.id}`)); } catch (error) { said(error.message); } }}>Show</button>
      <${Act} label="Redrive" name=${row.id} act=${async () => { const told = await post("dead-letters/redrive", {ids: [row.id]}); await again(); return redriven(told); }} />
      <${Act} label="Purge" name=${row.id} sure="Delete this dead letter?" act=${async () => { const told = await post("dead-letters/purge", {ids: [row.id]}); await again(); return told.waiting.length ? "not deleted: being redriven" : "deleted"; }} /></span>`]]} />
    ${shown && html`<${Dialog} title=${`Dead letter ${shown.id}`} close=${() => show(null)}>
      <p>${moment(shown.time)}, <span class="bad">${reasonOf(shown)}</span>${shown.route && html`, route ${shown.route}`}</p><${MessageShown} of=${shown} /><//>`}`;
}

export function Journal() {
  const [live, follow] = useState(true);
  return html`<h2>Journal</h2><section><${List} path="journal" key=${live} caption="Newest rows of the journal" empty="No rows." live=${live} filters=${[["route", "Route"]]} keyed=${row => `${row.shard} ${row.sequence}`} columns=${() => [
    ["Received", row => moment(row.received)], ["Route", row => row.route ? html`<${Go} at="route" words=${{name: row.route}}>${row.route}<//>` : "–"], ["From", row => `${row.source_endpoint} ${row.source_name ?? ""}`, "text"], ["To", row => row.target_endpoint ? `${row.target_endpoint} ${row.target_name ?? ""}` : "–", "text"],
    ["Outcome", row => row.outcome === "accepted" ? row.outcome : html`<span class="bad">${row.outcome} ${row.reason}</span>`], ["Client", row => row.client || "–"], ["Size", row => bytes(row.body_size), "number"]]}><label><input type="checkbox" checked=${live} onChange=${event => follow(event.target.checked)} /> Follow</label><//></section>`;
}
