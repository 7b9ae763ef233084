// Messages as they pass, while the view is open.
import {html, useEffect, useState} from "./vendor/htm.js";
import {get, query} from "./api.js";
import {Go, MessageShown, Table, number} from "./parts.js";
import {messageColumns} from "./queues.js";

const SHOWN_MAX = 100;
const [ADDRESS, ...OTHERS] = messageColumns.map(([head, cell, kind]) => [head, row => cell(row.message), kind]);
const COLUMNS = [ADDRESS, ["Route", row => row.route ? html`<${Go} at="route" words=${{name: row.route}}>${row.route}<//>` : "–"],
  ["Outcome", row => row.outcome === "accepted" ? row.outcome : html`<span class="bad">${row.outcome} ${row.text || row.reason}</span>`, "text"], ...OTHERS];

export function Tap() {
  const [words, watch] = useState(null), [seen, see] = useState({rows: [], skipped: 0}), [why, tell] = useState("");
  useEffect(() => {
    if (!words) return;
    let count = 0;
    const source = new EventSource(`api/v1/tap?${query(words)}`);
    source.addEventListener("message", event => see(({rows, skipped}) => ({rows: [{...JSON.parse(event.data), count: ++count}, ...rows].slice(0, SHOWN_MAX), skipped})));
    source.addEventListener("skipped", event => see(({rows, skipped}) => ({rows, skipped: skipped + JSON.parse(event.data).messages})));
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED) return;
      watch(null);
      get("session").then(() => tell("Cannot watch: no route, listener or link has this name, or five clients are watching already."), error => tell(error.message));
    });
    return () => source.close();
  }, [words]);
  const begin = event => { event.preventDefault(); tell(""); see({rows: [], skipped: 0}); watch(Object.fromEntries(new FormData(event.target))); };
  return html`<h2>Tap</h2><section>
    <form class="line" onSubmit=${begin}><label>Route<input name="route" /></label><label>Listener or link<input name="endpoint" /></label>
      <label>Topic, key or destination (* is any text)<input name="name" /></label><label>Messages per second<input name="per_second" type="number" min="1" max="100" value="10" /></label>
      <button class="act">Watch</button>${words && html`<button type="button" onClick=${() => watch(null)}>Stop</button>`}</form>
    <p role="status" class="soft">${words ? "Watching." : "Watching does not delay messages."}${seen.skipped > 0 && ` ${number(seen.skipped)} more were not shown, because of the rate limit.`}</p>
    ${why && html`<p class="bad" role="alert">${why}</p>`}
    <${Table} caption="Messages, newest first" rows=${seen.rows} keyed=${row => row.count} empty="No messages yet." open=${row => html`<${MessageShown} of=${row.message} />`} columns=${COLUMNS} /></section>`;
}
