// Console: one page with views of the API below /api/v1.
import {html, render, useEffect, useState} from "./vendor/htm.js";
import {begin, leave, listen, listenAlone, session} from "./api.js";
import {Notice, period, said} from "./parts.js";
import {Endpoints, Overview, Routes} from "./overview.js";
import {Connections, DeadLetters, Journal, Limits, Sessions} from "./broker.js";
import {Queues} from "./queues.js";
import {Mappings} from "./mappings.js";
import {Destinations, Exchanges, Retained, Users} from "./names.js";
import {Tap} from "./tap.js";

const Links = () => html`<h2>Links</h2><section><${Endpoints} kind="link" /></section>`;
const VIEWS = {overview: ["Overview", Overview], routes: ["Routes", Routes], links: ["Links", Links], connections: ["Connections", Connections], sessions: ["Sessions", Sessions],
  queues: ["Queues", Queues], exchanges: ["Exchanges", Exchanges], retained: ["Retained", Retained], destinations: ["Destinations", Destinations], "dead-letters": ["Dead letters", DeadLetters], mappings: ["Mappings", Mappings], journal: ["Journal", Journal], tap: ["Tap", Tap], users: ["Users", Users], limits: ["Limits", Limits]};
// Views for users with rights in some virtual hosts only.
const OF_HOSTS = ["queues", "exchanges", "destinations", "connections"];
const names = () => session.virtual_hosts ? OF_HOSTS : Object.keys(VIEWS);
const viewOf = hash => names().find(name => name === hash.slice(2).split("?")[0]) ?? names()[0];

function Console() {
  const [hash, turn] = useState(location.hash), view = viewOf(hash), [state, set] = useState(null), [lost, lose] = useState(false);
  useEffect(() => { addEventListener("hashchange", () => { turn(location.hash); said(""); }); if (session.virtual_hosts) listenAlone(); else listen(document => { set(document); lose(false); }, () => lose(true)); }, []);
  useEffect(() => { document.title = `gateway: ${VIEWS[view][0]}`; document.querySelector("nav [aria-current]")?.scrollIntoView({block: "nearest", inline: "nearest"}); }, [view]);
  const [text, kind] = session.virtual_hosts ? [`virtual hosts ${session.virtual_hosts.join(", ")}`, ""] : lost ? ["no connection", "bad"] : !state ? ["connecting", ""] : state.ready ? ["ready", "good"] : ["not ready", "bad"];
  return html`<header><h1>gateway</h1><span class="pill ${kind}">${text}</span>
      ${state && html`<span class="soft">version ${state.version}, up ${period(state.uptime_secs)}</span>`}<span class="bad">${state?.not_ready.join("; ")}</span>
      <span class="soft leave">${session.user} (${session.right})</span>${session.csrf && html`<button onClick=${leave}>Log out</button>`}</header>
    <nav aria-label="Views"><ul>${names().map(name => html`<li><a href=${`#/${name}`} aria-current=${name === view ? "page" : null}>${VIEWS[name][0]}</a></li>`)}</ul></nav>
    <main><${VIEWS[view][1]} key=${hash} state=${state} /></main><${Notice} />`;
}

await begin();
render(html`<${Console} />`, document.getElementById("app"));
