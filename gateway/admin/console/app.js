// Console: one page with views of the API below /api/v1.
import {html, render, useEffect, useState} from "./vendor/htm.js";
import {begin, leave, listen, listenAlone, session} from "./api.js";
import {Notice, period, said} from "./parts.js";
import {Endpoints, Overview, Routes} from "./overview.js";
import {Connections, DeadLetters, Journal, Limits, Sessions} from "./broker.js";
import {Queues} from "./queues.js";
import {Mappings} from "./mappings.js";
import {Destinations, Exchanges, Retained, Users} from "./names.js";
import {OBJECTS, Single} from "./objects.js";
import {Tap} from "./tap.js";

const Links = () => html`<h2>Links</h2><section><${Endpoints} kind="link" /></section>`;
const VIEWS = {overview: ["Overview", Overview], routes: ["Routes", Routes], links: ["Links", Links], connections: ["Connections", Connections], sessions: ["Sessions", Sessions],
  queues: ["Queues", Queues], exchanges: ["Exchanges", Exchanges], retained: ["Retained", Retained], destinations: ["Destinations", Destinations], "dead-letters": ["Dead letters", DeadLetters], mappings: ["Mappings", Mappings], journal: ["Journal", Journal], tap: ["Tap", Tap], users: ["Users", Users], limits: ["Limits", Limits]};
// Views for users with rights in some virtual hosts only.
const OF_HOSTS = ["queues", "exchanges", "destinations", "connections"];
const names = () => session.virtual_hosts ? OF_HOSTS : Object.keys(VIEWS);
// Name of the view, or of the view of the object, that the address names; and the kind of that object.
function placeOf(hash) {
  const name = hash.slice(2).split("?")[0], kind = OBJECTS[name] && names().includes(OBJECTS[name].view) ? name : null;
  return [names().find(one => one === (kind ? OBJECTS[kind].view : name)) ?? names()[0], kind];
}

function Console() {
  const [hash, turn] = useState(location.hash), [view, kind] = placeOf(hash), [state, set] = useState(null), [lost, lose] = useState(false);
  useEffect(() => { addEventListener("hashchange", () => { turn(location.hash); said(""); }); if (session.virtual_hosts) listenAlone(); else listen(document => { set(document); lose(false); }, () => lose(true)); }, []);
  useEffect(() => { if (!kind) document.title = `gateway: ${VIEWS[view][0]}`; document.querySelector("nav [aria-current]")?.scrollIntoView({block: "nearest", inline: "center"}); }, [view, kind]);
  const [text, colour] = session.virtual_hosts ? [`virtual hosts ${session.virtual_hosts.join(", ")}`, ""] : lost ? ["no connection", "bad"] : !state ? ["connecting", ""] : state.ready ? ["ready", "good"] : ["not ready", "bad"];
  return html`<header><h1>gateway</h1><span class="pill ${colour}">${text}</span>
      ${state && html`<span class="soft">version ${state.version}, up ${period(state.uptime_secs)}</span>`}<span class="bad">${state?.not_ready.join("; ")}</span>
      <span class="soft leave">${session.user} (${session.right})</span>${session.csrf && html`<button onClick=${leave}>Log out</button>`}</header>
    <nav aria-label="Views"><ul>${names().map(name => html`<li><a href=${`#/${name}`} aria-current=${name !== view ? null : kind ? "true" : "page"}>${VIEWS[name][0]}</a></li>`)}</ul></nav>
    <main><${kind ? Single : VIEWS[view][1]} key=${hash} kind=${kind} state=${state} /></main><${Notice} />`;
}

await begin();
render(html`<${Console} />`, document.getElementById("app"));
