// Views of the embedded broker without queues, and of access: exchanges, bindings, retained topics, destinations, users, roles.
import {html} from "./vendor/htm.js";
import {post} from "./api.js";
import {Act, Go, List, moment, number, bytes} from "./parts.js";

const yes = value => value ? "yes" : "no";
const shown = given => Object.keys(given).length ? JSON.stringify(given) : "–";

export const exchangeColumns = () => [
  ["Exchange", row => html`<${Go} at="exchange" words=${{virtual_host: row.virtual_host, name: row.name}}>${row.name}<//>`, "text"], ["Virtual host", row => row.virtual_host], ["Type", row => row.type], ["Durable", row => yes(row.durable)], ["Auto-delete", row => yes(row.auto_delete)],
  ["Internal", row => yes(row.internal)], ["Alternate", row => row.alternate || "–", "text"], ["Bindings", row => number(row.bindings), "number"]];

// Bindings, of one exchange or queue by `words`.
export const Bindings = ({caption = "Bindings", ...more}) => html`<${List} path="bindings" caption=${caption} keyed=${row => [row.virtual_host, row.source, row.destination_kind, row.destination, row.key, shown(row.arguments)].join(" ")} ...${more} columns=${() => [
  ["Exchange", row => html`<${Go} at="exchange" words=${{virtual_host: row.virtual_host, name: row.source}}>${row.source}<//>`, "text"], ["Virtual host", row => row.virtual_host], ["Key", row => row.key || "–", "text"],
  ["Destination", row => row.destination_kind === "queue" ? html`<${Go} at="queue" words=${{protocol: "amqp091", virtual_host: row.virtual_host, kind: "queue", queue: row.destination}}>${row.destination}<//>` : html`<${Go} at="exchange" words=${{virtual_host: row.virtual_host, name: row.destination}}>${row.destination}<//>`, "text"], ["Kind", row => row.destination_kind],
  ["Arguments", row => shown(row.arguments), "text"]]} />`;

export function Exchanges() {
  return html`<h2>Exchanges</h2>
    <section><${List} path="exchanges" caption="Exchanges" empty="No exchanges." filters=${[["name", "Name (* is any text)"], ["virtual_host", "Virtual host"]]} keyed=${row => `${row.virtual_host} ${row.name}`} columns=${exchangeColumns} /></section>
    <section><${Bindings} empty="Only the default exchange has bindings." filters=${[["source", "Exchange"], ["destination", "Destination"], ["virtual_host", "Virtual host"]]} /></section>`;
}

export function Retained() {
  return html`<h2>Retained</h2><section><${List} path="retained" caption="Topics with a retained message" empty="No retained messages." keyed=${row => row.topic}
    filters=${[["topic", "Topic filter (+ and #)"], ["client", "Client (* is any text)"], ["user", "User"]]} columns=${again => [
    ["Topic", row => row.topic, "text"], ["QoS", row => row.qos, "number"], ["Size", row => bytes(row.body_bytes), "number"], ["Client", row => row.client || "–"], ["User", row => row.user || "–"], ["Expires", row => row.expires ? moment(row.expires) : "never"],
    ["", row => html`<${Act} label="Delete" name=${row.topic} sure=${`Delete the retained message of ${row.topic}?`} act=${async () => { const told = await post("retained/remove", {topic: row.topic, exact: true}); await again(); return `${told.removed} deleted`; }} />`]]} /></section>`;
}

export function Destinations() {
  return html`<h2>Destinations</h2>
    <section><${List} path="destinations" caption="AMQP/Fast destinations" empty="No destinations." filters=${[["name", "Name (* is any text)"], ["virtual_host", "Virtual host"]]} keyed=${row => `${row.virtual_host} ${row.service} ${row.name}`} columns=${() => [
      ["Destination", row => row.name, "text"], ["Service", row => row.service], ["Virtual host", row => row.virtual_host], ["Temporary", row => yes(row.temporary)]]} /></section>
    <section><${List} path="transfers" caption="Resumable transfers" empty="No resumable transfers." keyed=${row => `${row.virtual_host} ${row.client} ${row.heard}`} columns=${() => [
      ["Client", row => row.client, "text"], ["Virtual host", row => row.virtual_host], ["Received", row => bytes(row.received_bytes), "number"], ["Size", row => bytes(row.body_bytes), "number"], ["Active", row => yes(row.under_way)], ["Last received", row => moment(row.heard)]]} /></section>`;
}

export function Users() {
  return html`<h2>Users</h2>
    <section><${List} path="users" caption="Users" empty="No users are configured." filters=${[["name", "Name (* is any text)"]]} keyed=${row => row.name} columns=${() => [
      ["User", row => row.name, "text"], ["Roles", row => row.roles.join(", ") || "none", "text"]]} /></section>
    <section><${List} path="roles" caption="Roles" empty="No roles are configured: every client may do everything." filters=${[["name", "Name (* is any text)"]]} keyed=${row => row.name} columns=${() => [
      ["Role", row => row.name, "text"], ["Console", row => row.console], ["Rules", row => html`<code>${JSON.stringify(row.says)}</code>`, "text"]]} /></section>`;
}
