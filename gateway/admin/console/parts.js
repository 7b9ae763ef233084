// Building blocks of the views.
import {html, useEffect, useRef, useState} from "./vendor/htm.js";
import {get, may, query, useAsked} from "./api.js";
import {TEXTS} from "./words.js";

export const number = n => n === null || n === undefined ? "–" : n >= 1e6 ? (n / 1e6).toFixed(2) + " M" : n >= 1e4 ? (n / 1e3).toFixed(1) + " k"
  : n >= 100 || Number.isInteger(n) ? String(Math.round(n)) : n.toFixed(n < 1 ? 2 : 1);
export const bytes = n => n === null ? "–" : n >= 1e9 ? (n / 1e9).toFixed(1) + " GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + " MB" : n >= 1e3 ? (n / 1e3).toFixed(1) + " kB" : Math.round(n) + " B";
export const millis = s => s === null ? "–" : "≤ " + number(s * 1000) + " ms";
export const period = s => s === null ? "–" : s < 120 ? Math.round(s) + " s" : s < 7200 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
export const moment = text => text ? text.slice(0, 19).replace("T", " ") + " UTC" : "–";
export const red = n => n > 0 ? html`<span class="bad">${number(n)}</span>` : number(n);

let tell = () => {};
export const said = text => tell(text);

// Result of an action, announced by screen readers.
export function Notice() {
  const [text, set] = useState("");
  tell = set;
  return html`<p class="notice" role="status">${text}</p>`;
}

// Button, shown with the right to write; `sure` is a question to confirm first.
export function Act({label, act, sure, name}) {
  const [busy, set] = useState(false);
  if (!may()) return null;
  const go = async () => {
    if (sure && !confirm(sure)) return;
    set(true);
    try { said(await act() || ""); } catch (error) { said(error.message); }
    set(false);
  };
  return html`<button disabled=${busy} onClick=${go} aria-label=${name ? `${label} ${name}` : null}>${label}</button>`;
}

// Link to a page, as `at` of an address; empty words are left out, as those of a request.
export const Go = ({at, words = {}, kind, children}) => html`<a class=${kind} href=${`#/${at}${Object.keys(words).length ? `?${query(words)}` : ""}`}>${children}</a>`;

// What follows `?` in the address: the filters that a link to a view sets, or the words of one object.
export const wanted = () => Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] || ""));

// Text of a cell, and the number that it stands for; texts without one are sorted behind numbers.
const plain = cell => cell === null || cell === undefined || cell === false ? "" : Array.isArray(cell) ? cell.map(plain).join(" ") : typeof cell === "object" ? plain(cell.props?.children) : String(cell);
const UNITS = {"": 1, k: 1e3, M: 1e6, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, ms: .001, s: 1, min: 60, h: 3600, "%": 1};
function rank(cell) {
  const text = plain(cell), found = /^[≤ ]*(-?[0-9.]+) ?([a-zA-Z%]*)$/.exec(text);
  return found && found[2] in UNITS ? [0, Number(found[1]) * UNITS[found[2]], ""] : [1, 0, text];
}
export function sorted(rows, columns, order) {
  const [, cell] = columns.find(([head]) => head === order.head), way = order.down ? -1 : 1;
  const ranked = rows.map(row => [rank(cell(row)), row]);
  ranked.sort(([a], [b]) => a[0] - b[0] || way * (a[1] - b[1] || a[2].localeCompare(b[2])));
  return ranked.map(([, row]) => row);
}

// Heading and table, with `children` between them. Columns are [heading, function from row to cell, "number" or "text" or nothing]. `order` is {head, down} or null; without `turn` the table sorts by itself.
// With `open`, a function from a row to what is in it, a click on the first cell opens the row.
export function Table({caption, children, ...more}) {
  return html`<h3>${caption}</h3>${children}<${Rows} caption=${caption} ...${more} />`;
}

// On a phone each row is a block with a line per column (console.css), so no column is out of sight.
function Rows({caption, columns, rows, keyed, empty = "None.", order, turn, open}) {
  const [own, turnOwn] = useState(null), [opened, setOpened] = useState(new Set());
  if (!rows) return html`<p class="soft">…</p>`;
  if (!rows.length) return html`<p class="soft">${empty}</p>`;
  const toggle = key => { const next = new Set(opened); if (!next.delete(key)) next.add(key); setOpened(next); };
  const first = (row, cell, is) => html`<button class="open" aria-expanded=${is} onClick=${() => toggle(keyed(row))}><span aria-hidden="true">${is ? "▾" : "▸"}</span> ${cell}</button>`;
  const drawn = row => {
    const is = open && opened.has(keyed(row));
    return html`<tr key=${keyed(row)}>${columns.map(([head, cell, kind], at) => html`<td class=${kind} data-head=${head}>${open && at === 0 ? first(row, cell(row), is) : cell(row)}</td>`)}</tr>
      ${is && html`<tr key=${`${keyed(row)} opened`} class="opened"><td colspan=${columns.length}>${open(row)}</td></tr>`}`;
  };
  const now = turn ? order : own;
  const shown = !turn && own ? sorted(rows, columns, own) : rows;
  const next = (head, kind) => (turn || turnOwn)(now?.head !== head ? {head, down: kind === "number"} : now.down === (kind === "number") ? {head, down: !now.down} : null);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table aria-label=${caption}>
    <thead><tr>${columns.map(([head, , kind]) => html`<th scope="col" class=${kind} aria-sort=${now?.head !== head ? null : now.down ? "descending" : "ascending"}>
      ${head && html`<button class="sort" title=${`Sort by ${head}`} onClick=${() => next(head, kind)}>${head}<span aria-hidden="true">${now?.head !== head ? "" : now.down ? " ▾" : " ▴"}</span></button>`}</th>`)}</tr></thead>
    <tbody>${shown.map(drawn)}</tbody>
  </table></div>`;
}

const SHOWN = 50, SORTED_MAX = 1000;

// List of the API, page by page, refreshed while it is shown. `orders` are columns by which the gateway sorts; by others, the first SORTED_MAX rows are sorted here. Columns of `without` are left out.
export function List({path, caption, columns, keyed, words = {}, filters = [], choose = () => {}, empty, live = true, orders = {}, without = [], children}) {
  const [chosen, setChosen] = useState(() => Object.fromEntries(filters.flatMap(([name]) => name in wanted() ? [[name, wanted()[name]]] : [])));
  const [pages, setPages] = useState([""]), [order, setOrder] = useState(null);
  const after = pages[pages.length - 1], served = order && orders[order.head];
  const asked = {count: order && !served ? SORTED_MAX : SHOWN, after, ...words, ...chosen, ...(served ? {sort: served} : {})};
  const {document: found, error, again} = useAsked(() => get(path, asked), [path, JSON.stringify(asked)], live);
  choose(again);
  const shown = columns(again).filter(([head]) => !without.includes(head));
  const turn = next => { setPages([""]); setOrder(next && orders[next.head] && next.head === order?.head ? null : next); };
  const rows = found && (order && !served ? sorted(found.items, shown, order).slice(0, SHOWN) : found.items);
  const given = event => { event.preventDefault(); setPages([""]); setChosen(Object.fromEntries(new FormData(event.target))); };
  return html`<${Table} caption=${found && found.total !== undefined ? `${caption}: ${number(found.total)}` : caption} columns=${shown} rows=${rows} keyed=${keyed} empty=${empty} order=${order} turn=${turn}>${children}
    ${filters.length > 0 && html`<form class="line" role="search" onSubmit=${given}>
      ${filters.map(([name, label]) => html`<label>${label}${TEXTS[path]?.[name]
        ? html`<select name=${name}><option value="">any</option>${TEXTS[path][name].map(one => html`<option selected=${chosen[name] === one}>${one}</option>`)}</select>`
        : html`<input name=${name} defaultValue=${chosen[name] ?? ""} />`}</label>`)}
      <button>Show</button></form>`}
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    <//>
    ${order && !served && found?.total > SHOWN && html`<p class="soft">The first ${SHOWN} of ${number(Math.min(found.total, SORTED_MAX))} rows by ${order.head}.</p>`}
    ${!(order && !served) && (pages.length > 1 || found?.next) && html`<p class="acts">
      <button disabled=${pages.length < 2} onClick=${() => setPages(pages.slice(0, -1))}>Previous page</button>
      <button disabled=${!found?.next} onClick=${() => setPages([...pages, found.next])}>Next page</button></p>`}`;
}

export function Dialog({title, close, children}) {
  const drawn = useRef(null);
  useEffect(() => { drawn.current.showModal(); }, []);
  return html`<dialog ref=${drawn} aria-labelledby="dialog-title" onClose=${close}>
    <h2 id="dialog-title">${title}</h2>${children}
    <p><button onClick=${() => drawn.current.close()}>Close</button></p></dialog>`;
}

// Names and values in two columns; an absent value is left out.
export const Facts = ({pairs}) => html`<dl class="facts">${pairs.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const worded = pairs => pairs.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);

// A message with all that the caller may see of it: of a queue, of a dead letter, or as it passes.
export function MessageShown({of}) {
  const sender = of.sender, {headers = [], ...properties} = of.properties;
  // Those of a dead letter are [name, type, value].
  const named = of.headers ? Object.entries(of.headers) : headers.map(([name, , value]) => [name, value]);
  return html`<${Facts} pairs=${[["Address", of.address], ["Client", sender.client], ["User", sender.user], ["Received by", sender.endpoint], ["Client address", sender.address], ["QoS", of.assurance], ["Durable", of.durable ? "yes" : "no"], ["Retain", of.retain ? "yes" : "no"],
      ["Content type", of.content_type], ["Size", bytes(of.body_bytes)]]} />
    ${[["Properties", Object.entries(properties)], ["Headers", named]].map(([title, pairs]) => html`<h4>${title}</h4>${pairs.length ? html`<${Facts} pairs=${worded(pairs)} />` : html`<p class="soft">None.</p>`}`)}
    <h4>Body</h4>${of.body_encoding === "withheld" ? html`<p class="soft">Your roles do not permit reading bodies.</p>` : of.body === "" ? html`<p class="soft">Empty.</p>` : html`<${Body} of=${of} />`}`;
}

export const Body = ({of}) => html`<pre>${of.body_encoding === "withheld" ? "(withheld)" : of.body_encoding === "base64" ? `(base64) ${of.body}` : of.body}${of.body_bytes > of.body.length && of.body.length >= 1000 ? " …" : ""}</pre>`;

// The words of an address, by the protocol of an endpoint.
export const WORDS = {mqtt: [["topic", "Topic"]], amqp091: [["exchange", "Exchange"], ["routing_key", "Routing key or queue"]],
  amqpfast: [["service", "Service (queue or topic)"], ["destination", "Destination"]]};

// Input fields of a message to publish.
export function MessageFields({endpoints, endpoint, setEndpoint}) {
  const known = endpoints || [];
  const protocol = (known.find(one => one.name === endpoint) || known[0])?.protocol;
  return html`<label>Endpoint<select name="endpoint" value=${endpoint || known[0]?.name} onChange=${event => setEndpoint(event.target.value)}>
      ${known.map(one => html`<option value=${one.name}>${one.name}</option>`)}</select></label>
    ${(WORDS[protocol] || []).map(([word, label]) => html`<label key=${word}>${label}<input name=${word} /></label>`)}
    <label>Content type<input name="content_type" /></label><label>Reply to<input name="reply_to" /></label>
    <label>Client<input name="client" /></label><label>User<input name="user" /></label>
    <label>QoS<select name="qos"><option>0</option><option>1</option>${protocol === "mqtt" && html`<option>2</option>`}</select></label>
    ${protocol === "mqtt" && html`<label>Retain<select name="retain"><option value="">no</option><option value="true">yes</option></select></label>`}
    <label style="flex-basis: 100%; max-width: none">Headers, one per line: NAME=VALUE<textarea name="headers"></textarea></label>
    <label style="flex-basis: 100%; max-width: none">Body<textarea name="body"></textarea></label>`;
}

export function messageOf(form) {
  const {headers = "", retain, ...said} = Object.fromEntries(new FormData(form));
  const named = headers.split("\n").filter(line => line.trim()).map(line => {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`a header is NAME=VALUE, not ${line}`);
    return [line.slice(0, at).trim(), line.slice(at + 1)];
  });
  return {...(named.length ? {headers: Object.fromEntries(named)} : {}), ...(retain ? {retain: true} : {}), ...Object.fromEntries(Object.entries(said).filter(([name, text]) => text !== "" || name === "exchange")), qos: Number(said.qos || 0)};
}
