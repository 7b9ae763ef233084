// Mapping files: the routing of a message by them or by a draft, and the changes of a reload.
import {html, useState} from "./vendor/htm.js";
import {get, may, post, useAsked} from "./api.js";
import {Act, MessageFields, messageOf} from "./parts.js";

const faultOf = one => `${one.file}:${one.line}:${one.column}: ${one.message}`;

function Verdict({found}) {
  if (found.faults.length) return html`<div role="status"><p class="bad">The draft is invalid:</p><ul>${found.faults.map(one => html`<li>${faultOf(one)}</li>`)}</ul></div>`;
  return html`<div role="status"><p>${found.address}: ${found.matches.filter(one => one.crosses).length} of ${found.matches.length + found.misses.length} routes match.</p><ul>
    ${found.matches.map(one => html`<li><b>${one.route}</b> ${one.crosses ? html`<span class="good">matches</span>, to ${one.endpoint}: ${one.address}` : html`<span class="bad">refused: ${one.refused || one.why}</span>`}
      ${one.when && html` <span class="soft">when ${one.when}</span>`}
      ${one.made && html`<pre class="soft">${JSON.stringify(one.made)}</pre>`}</li>`)}
    ${found.misses.map(one => html`<li class="soft"><b>${one.route}</b>: ${one.reason}</li>`)}</ul></div>`;
}

export function Mappings() {
  const {document: files, error, again} = useAsked(() => get("mappings"), [], false);
  const {document: endpoints} = useAsked(() => get("endpoints", {count: 1000}), [], false);
  const [drafts, draft] = useState({}), [endpoint, setEndpoint] = useState(""), [found, find] = useState(null), [change, setChange] = useState("");
  const [why, tell] = useState("");
  const drafted = Object.keys(drafts).length > 0;
  const change_of = told => !told.good ? told.faults.map(faultOf).join("\n")
    : ["added", "removed", "changed"].filter(word => told[word].length).map(word => `${word}: ${told[word].join(", ")}`).join("\n") || "no changes";
  const attempt = async event => {
    event.preventDefault();
    try {
      find(await post("mappings/explain", {...messageOf(event.target), ...(drafted ? {files: drafts} : {})}));
      tell("");
    } catch (error) { find(null); tell(error.message); }
  };
  return html`<h2>Mappings</h2>
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    <div class="columns"><div>
      <section><h3>Files</h3>${files?.items.map(one => html`<label>${one.file}${drafts[one.file] !== undefined && html` <b class="warn">draft</b>`}
          ${one.text === null ? html`<span class="bad"> ${one.why}</span>` : html`<textarea rows="16" spellcheck="false" value=${drafts[one.file] ?? one.text}
            onInput=${event => { const {[one.file]: _, ...others} = drafts; draft(event.target.value === one.text ? others : {...others, [one.file]: event.target.value}); }}></textarea>`}</label>`)}
        <p class="soft">Drafts are not saved. Test them here, then change the files themselves.</p>
        <p class="acts">${drafted && html`<button onClick=${() => draft({})}>Discard the draft</button>`}
          <${Act} label="Show changes" act=${async () => { setChange(change_of(await post("mappings/dry-run"))); }} />
          <${Act} label="Reload" act=${async () => { const told = await post("mappings/reload"); await again(); return told.taken ? `reloaded: ${told.routes} routes` : told.why; }} /></p>
        ${change && html`<pre role="status">${change}</pre>`}</section></div>
    <section><h3>Explain a message</h3>
      ${may() ? html`<form class="line" onSubmit=${attempt}><${MessageFields} endpoints=${endpoints?.items} endpoint=${endpoint} setEndpoint=${setEndpoint} />
        <button class="act">Explain</button></form>` : html`<p class="soft">Explaining needs write access.</p>`}
      ${why && html`<p class="bad" role="alert">${why}</p>`}${found && html`<${Verdict} found=${found} />`}</section></div>`;
}
