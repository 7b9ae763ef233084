// Overview: what happens now, the last hour, routes as a picture.
import {html, useEffect, useRef} from "./vendor/htm.js";
import {everything, get, post, useAsked} from "./api.js";
import {Act, Go, List, Table, millis, moment, number, bytes, period, red} from "./parts.js";

const ROUTES_DRAWN_MAX = 24, SLOW_SECS = 1, HOUR_SECS = 3600, NEW_SECS = 120;

const clocks = ticks => ticks.map(secs => new Date(secs * 1000).toISOString().slice(11, ticks[1] - ticks[0] < 60 ? 19 : 16));
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Lines over the last hour, or at `times` (in seconds), with their numbers in words for who cannot see them.
export function Chart({title, lines, stepSecs, until, times, unit = "per second"}) {
  const place = useRef(null), drawn = useRef(null), hour = useRef([0, 1]);
  const shape = JSON.stringify(lines.map(([name]) => name));
  useEffect(() => {
    const width = () => Math.max(place.current.clientWidth, 200);
    const ink = colour("--soft"), grid = {stroke: colour("--line"), width: 1};
    const made = new uPlot({
      width: width(), height: 180, cursor: {drag: {x: false, y: false}}, legend: {live: false, markers: {dash: (_, at) => lines[at - 1]?.[3] ? "dashed" : "solid"}}, scales: {x: {range: () => hour.current}, y: {range: (_, low, high) => [0, high || 1]}},
      axes: [{stroke: ink, grid, space: 72, values: (_, ticks) => clocks(ticks)}, {stroke: ink, grid, size: 56, values: (_, ticks) => ticks.map(number)}],
      series: [{}, ...lines.map(([label, , stroke, dash]) => ({label, stroke: colour(stroke), width: 2, dash}))],
    }, [[]], place.current);
    drawn.current = made;
    const watched = new ResizeObserver(() => made.setSize({width: width(), height: 180}));
    watched.observe(place.current);
    return () => { watched.disconnect(); made.destroy(); };
  }, [shape]);
  useEffect(() => {
    const count = Math.max(0, ...lines.map(([, values]) => values.length));
    const end = times ? times.at(-1) : Date.parse(until) / 1000;
    hour.current = [times ? Math.min(times[0], end - NEW_SECS) : end - HOUR_SECS, end];
    drawn.current.setData([times ?? Array.from({length: count}, (_, at) => end - (count - at) * stepSecs), ...lines.map(([, values]) => [...Array(count - values.length).fill(null), ...values])]);
  }, [lines, until]);
  const told = lines.map(([name, values]) => `${name}: at most ${number(Math.max(0, ...values))}, last ${number(values.at(-1) ?? 0)}`).join("; ");
  return html`<section><h3>${title} <span class="soft">${unit}, times in UTC</span></h3><div ref=${place} role="img" aria-label=${`${title}, ${unit}. ${told}`}></div></section>`;
}

// Figures; `view` is where the rows behind one are.
export const Numbers = ({pairs}) => html`<dl class="numbers">${pairs.map(([text, value, kind, view]) => html`<div><dt>${text}</dt><dd class=${kind}>${view ? html`<a href=${`#/${view}`} aria-label=${`${text}: ${value}`}>${value}</a>` : value}</dd></div>`)}</dl>`;

// Link to the rows that an alarm is about: its name, and words.
const ROWS = {GatewayOutboxOld: ["routes"], GatewayDeadLetters: ["dead-letters"], GatewayQueueUnconsumed: ["queues", {empty: "false"}], GatewayJournalLosesRows: ["journal"]};
function rowsOf({name, of}) {
  const [, kind, paused] = /^(route|link) (.*)$/.exec(name === "GatewayPaused" ? of : "") ?? [];
  return kind ? [kind, {name: paused}] : /Link/.test(name) ? ["link", {name: of.split(": ")[0]}] : ROWS[name] ?? ["limits"];
}

function Alarms({alarms}) {
  return html`<${Table} caption=${`Alarms: ${alarms.length}`} rows=${alarms} keyed=${row => `${row.name} ${row.of}`} empty="No alarms." columns=${[
    ["Alarm", row => { const [at, words] = rowsOf(row); return html`<${Go} at=${at} words=${words} kind="bad">${row.name}<//>`; }], ["Object", row => row.of || "the gateway", "text"], ["Problem", row => row.text, "text"], ["Action", row => row.act, "text"], ["Since", row => moment(row.since)], ["Runbook", row => html`<code>${row.page}</code>`]]} />`;
}

const COLOURS = ["--flow", "--good", "--warn", "--bad"];

// Frames of each protocol, received and sent.
function Frames() {
  const {document: rates} = useAsked(() => get("rates", {kind: "protocol"}), []);
  const used = rates?.items.filter(one => one.now > 0 || one.values.some(value => value > 0)) ?? [];
  const first = used[0];
  if (!first) return null;
  const protocols = [...new Set(used.map(one => one.name))];
  const lines = used.map(one => [`${one.name} ${one.what === "frames_in" ? "in" : "out"}`, one.values, COLOURS[protocols.indexOf(one.name) % COLOURS.length], one.what === "frames_in" ? undefined : [6, 4]]);
  return html`<${Chart} title="Frames by protocol and direction" stepSecs=${first.step_secs} until=${first.until} lines=${lines} />`;
}

export function Overview({state}) {
  const {document: rates} = useAsked(() => get("rates", {kind: "process"}), []);
  const lines = names => names.map(([what, label, stroke]) => [label, rates?.items.find(one => one.what === what)?.values || [], stroke]);
  const first = rates?.items[0];
  if (!state) return html`<p class="soft">…</p>`;
  const sum = field => state.endpoints.reduce((all, one) => all + one[field], 0);
  const now = what => rates?.items.find(one => one.what === what)?.now ?? 0;
  return html`<h2>Overview</h2>
    <section><${Alarms} alarms=${state.alarms} /></section>
    <section><h3>Now</h3><${Numbers} pairs=${[
      ["messages in /s", number(now("in")), "", "routes"], ["messages out /s", number(now("out")), "", "routes"], ["refused /s", number(now("refused")), now("refused") ? "bad" : "", "dead-letters"],
      ["connections", number(sum("connections")), "", "connections"], ["queues", number(state.broker.gateway_queues ?? 0), "", "queues"], ["sessions", number(state.broker.gateway_sessions ?? 0), "", "sessions"],
      ["dead letters", number(state.broker.gateway_dead_letters ?? 0), (state.broker.gateway_dead_letters ?? 0) > (state.broker.gateway_dead_letters_unwanted ?? 0) ? "warn" : "", "dead-letters"],
      ["refused mapping reloads", number(state.mapping_reloads.refused), state.mapping_reloads.refused ? "warn" : "", "mappings"]]} /></section>
    ${first && html`<div class="columns">
      <${Chart} title="Messages" stepSecs=${first.step_secs} until=${first.until} lines=${lines([["in", "in", "--flow"], ["out", "out", "--good"]])} />
      <${Chart} title="Outcomes" stepSecs=${first.step_secs} until=${first.until} lines=${lines([["settled", "settled", "--flow"], ["refused", "refused", "--bad"], ["dead_letters", "dead letters", "--warn"]])} />
    </div>
    <${Frames} />`}
    <section><${Endpoints} /></section>
    ${state.outboxes.length > 0 && html`<section><${Outboxes} rows=${state.outboxes} /></section>`}
    <section><h3>Store and journal</h3><${Disks} disks=${state.disks} /></section>`;
}

export const Outboxes = ({rows}) => html`<${Table} caption=${`Outboxes: ${rows.length}`} rows=${rows} keyed=${row => row.route} empty="No outboxes. Messages that a target does not accept remain with their senders." columns=${[
  ["Route", row => html`<${Go} at="route" words=${{name: row.route}}>${row.route}<//>`, "text"], ["Link", row => html`<${Go} at="link" words=${{name: row.link}}>${row.link}<//>`], ["Place", row => row.shared ? "cluster" : "store"], ["Messages", row => number(row.messages), "number"], ["Size", row => bytes(row.messages_bytes), "number"],
  ["Oldest", row => row.messages && row.oldest_secs !== null ? period(row.oldest_secs) : "–", "number"], ["Maximum", row => `${number(row.messages_max)}, ${bytes(row.bytes_max)}${row.age_secs_max ? `, ${period(row.age_secs_max)}` : ""}; then ${row.policy}`, "text"],
  ["Dropped", row => row.dropped === null ? "–" : red(row.dropped), "number"], ["Problem", row => row.problem || "none", "text"]]} />`;

function Disks({disks: {store, journal}}) {
  const health = one => [one.healthy ? "healthy" : "not writable", one.healthy ? "good" : "bad"];
  return html`<${Numbers} pairs=${[
    ...(store ? [["store", ...health(store)], ["waiting for the disk", number(store.pending_messages), "", "limits"], ["refused because of the disk", number(store.refused), store.refused ? "bad" : "", "limits"]] : [["store", "off", "soft"]]),
    ...(journal ? [["journal", ...health(journal)], ["rows waiting", number(journal.backlog_rows), "", "journal"], ["rows dropped", number(journal.dropped), journal.dropped ? "warn" : "", "journal"]] : [["journal", "off", "soft"]])]} />`;
}

const errorsOf = row => Object.entries(row.errors).map(([reason, count]) => `${reason} ${number(count)}`).join(", ") || "none";

export const endpointColumns = again => [
    ["Name", row => html`<${Go} at=${row.kind} words=${{name: row.name}}>${row.name}<//>`], ["Kind", row => `${row.protocol} ${row.kind}`],
    ["State", row => row.kind === "listener" ? html`<${Go} at="connections" words=${{endpoint: row.name}}>${number(row.connections)} connected<//>` : row.paused ? html`<span class="warn">paused</span>` : row.up ? html`<span class="good">up at ${row.place}</span>` : html`<span class="bad">down: ${row.why}</span>`, "text"],
    ["In /s", row => number(row.in_per_sec), "number"], ["Out /s", row => number(row.out_per_sec), "number"], ["p50", row => millis(row.p50_secs), "number"], ["p99", row => millis(row.p99_secs), "number"],
    ["In flight", row => number(row.in_flight), "number"], ["Errors", errorsOf, "text"], ["Last error", row => row.last_error ? `${row.last_error}, ${moment(row.last_error_at)}` : "none", "text"],
    ["", row => row.kind === "link" && !row.name.endsWith(" (in)") && html`<${Pause} at="links" row=${row} again=${again} />`]];

// `kind`: links alone, or all.
export const Endpoints = ({kind}) => html`<${List} path="endpoints" caption=${kind === "link" ? "Links" : "Listeners and links"} words=${kind ? {kind} : {}} keyed=${row => row.name} empty="No links are configured." columns=${endpointColumns} />`;

export function Pause({at, row, again}) {
  const word = row.paused ? "resume" : "pause";
  const act = async () => { await post(`${at}/${word}`, {name: row.name}); await again(); return `${row.name}: ${row.paused ? "resumed" : "paused"}`; };
  return html`<${Act} label=${row.paused ? "Resume" : "Pause"} name=${row.name} act=${act} />`;
}

const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

// Which endpoint feeds which; the table below says the same in words.
function Picture({routes, endpoints}) {
  const kindOf = route => route.refused_per_sec > 0 ? "failing" : (route.p99_secs || 0) >= SLOW_SECS ? "slow" : "";
  const urgency = route => kindOf(route) === "failing" ? 3 : route.paused ? 2 : kindOf(route) ? 1 : 0;
  const shown = [...routes].sort((a, b) => urgency(b) - urgency(a) || b.in_per_sec - a.in_per_sec).slice(0, ROUTES_DRAWN_MAX).sort((a, b) => a.name.localeCompare(b.name));
  const known = new Map(endpoints.map(one => [one.name, one]));
  const column = key => [...new Set(shown.map(route => route[key]))].sort();
  const sources = column("source"), targets = column("target");
  const height = 20 + Math.max(shown.length * 50, sources.length * 62, targets.length * 62, 50);
  const place = (list, name) => 10 + (list.indexOf(name) + .5) * (height - 20) / list.length;
  const box = (x, y, width, text, note, kind) => html`<g><rect x=${x} y=${y - 20} width=${width} height="40" rx="6" />
    <text x=${x + 12} y=${y - 3}>${cut(text, Math.floor((width - 24) / 7))}</text><text x=${x + 12} y=${y + 13} class="small ${kind}">${note}</text></g>`;
  const curve = (x1, y1, x2, y2, rate, kind) => html`<path class="${rate > 0 ? "live" : ""} ${kind}" stroke-width=${1.5 + 1.6 * Math.log10(1 + rate)}
    d=${`M${x1},${y1} C${(x1 + x2) / 2},${y1} ${(x1 + x2) / 2},${y2} ${x2},${y2}`} />`;
  const noteOf = route => route.paused ? [`paused, ${number(route.held)} held`, "warn"] : kindOf(route) === "failing" ? [`${number(route.out_per_sec)}/s, failing`, "bad"]
    : kindOf(route) ? [`${number(route.out_per_sec)}/s, slow`, "warn"] : [`${number(route.out_per_sec)}/s`, ""];
  const endpoint = (x, y, name) => {
    const one = known.get(name), down = !one || (one.kind === "link" && !one.up);
    return box(x, y, 200, name, one ? `${one.protocol} ${one.kind}${down ? ", down" : ""}` : "not configured", down ? "bad" : "");
  };
  const told = shown.map(route => `${route.source} to ${route.target} by ${route.name}: ${noteOf(route)[0]}`).join("; ");
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Picture of the routes"><svg class="flow" role="img" aria-label=${told || "no routes"} viewBox=${`0 0 1100 ${height}`}>
    ${shown.map((route, at) => {
      const y = 10 + (at + .5) * (height - 20) / shown.length, [note, kind] = noteOf(route);
      return html`<g key=${route.name}>${curve(210, place(sources, route.source), 425, y, route.in_per_sec, "")}
        ${curve(675, y, 890, place(targets, route.target), route.out_per_sec, kindOf(route))}${box(425, y, 250, route.name, note, kind)}</g>`;
    })}
    ${sources.map(name => endpoint(10, place(sources, name), name))}${targets.map(name => endpoint(890, place(targets, name), name))}</svg></div>`;
}

export const routeColumns = again => [
  ["Route", row => html`<${Go} at="route" words=${{name: row.name}}>${row.name}<//>`], ["From", row => row.source], ["To", row => row.target], ["In /s", row => number(row.in_per_sec), "number"], ["Out /s", row => number(row.out_per_sec), "number"], ["p50", row => millis(row.p50_secs), "number"],
  ["p99", row => millis(row.p99_secs), "number"], ["Matched", row => number(row.matched), "number"], ["Delivered", row => number(row.delivered), "number"],
  ["In flight", row => number(row.in_flight + row.held), "number"], ["Retried", row => number(row.retried), "number"], ["Failed", row => row.failed ? html`<${Go} at="dead-letters" words=${{route: row.name}} kind="bad">${number(row.failed)}<//>` : number(row.failed), "number"], ["Dropped", row => red(row.dropped), "number"],
  ["Undecided", row => red(row.unparsable + row.undecided), "number"], ["File", row => `${row.file}:${row.line}`, "text"],
  ["", row => html`<${Pause} at="routes" row=${row} again=${again} />`]];

export function Routes() {
  const {document: found, again} = useAsked(async () => {
    const [routes, endpoints] = await Promise.all([everything("routes"), everything("endpoints")]);
    return {routes, endpoints};
  }, []);
  return html`<h2>Routes</h2>
    ${found && html`<section><h3>Message flow</h3>
      ${found.routes.length > ROUTES_DRAWN_MAX && html`<p class="soft">${ROUTES_DRAWN_MAX} of ${number(found.routes.length)} routes are drawn: failing, paused and slow ones first, then the busiest.</p>`}
      <${Picture} ...${found} /></section>`}
    <section><${List} path="routes" caption="Routes" filters=${[["name", "Name (* is any text)"]]} keyed=${row => row.name} empty="No routes are in force." columns=${list => routeColumns(async () => { await list(); await again(); })} /></section>`;
}
