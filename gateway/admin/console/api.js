// Requests of the views, and events from the gateway.
import {useEffect, useRef, useState} from "./vendor/htm.js";

const listeners = new Set();
export const session = {user: "", right: "read", csrf: null, virtual_hosts: null};
export const may = () => session.right === "write";

async function asked(path, options = {}) {
  const answer = await fetch(`api/v1/${path}`, {cache: "no-store", ...options});
  if (answer.status === 401 || (answer.status === 403 && path.startsWith("session?"))) { location.replace("login"); throw new Error("logged out"); }
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.detail);
  return document;
}

export const query = words => new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "" && value !== undefined)).toString();
export const get = (path, words = {}) => asked(`${path}?${query(words)}`);
// Return the rows of all pages of a list.
export async function everything(path, words = {}) {
  const rows = [];
  for (let after = ""; after !== null;) {
    const page = await get(path, {count: 1000, ...words, after});
    rows.push(...page.items);
    after = page.next;
  }
  return rows;
}
export const post = (path, body = {}) => asked(path, {method: "POST", body: JSON.stringify(body),
  headers: {"Content-Type": "application/json", ...(session.csrf ? {"X-CSRF-Token": session.csrf} : {})}});

export async function begin() { Object.assign(session, await get("session")); }
export async function leave() { await post("logout"); location.replace("login"); }

// A user with rights in some virtual hosts only receives no events; views are refreshed by a timer instead.
export function listenAlone() { setInterval(() => { for (const one of listeners) one(null); }, 2000); }

// The gateway sends its state every two seconds; views with other data are refreshed then.
export function listen(state, lost) {
  const source = new EventSource("api/v1/events");
  source.addEventListener("state", event => {
    const document = JSON.parse(event.data);
    state(document);
    for (const one of listeners) one(document);
  });
  source.addEventListener("error", () => {
    lost();
    if (source.readyState === EventSource.CLOSED) get("session").then(() => setTimeout(() => listen(state, lost), 2000), () => setTimeout(() => listen(state, lost), 2000));
  });
}

// Result of `ask`, repeated at each event of the gateway, and by `again`.
export function useAsked(ask, depends, live = true) {
  const [found, set] = useState({document: null, error: ""});
  const round = useRef(0);
  const again = () => {
    const mine = ++round.current;
    return ask().then(document => mine === round.current && set({document, error: ""}),
                      error => mine === round.current && set(last => ({...last, error: error.message})));
  };
  useEffect(() => {
    again();
    if (!live) return () => { round.current++; };
    const tick = () => { if (!document.hidden) again(); };
    listeners.add(tick);
    return () => { listeners.delete(tick); round.current++; };
  }, depends);
  return {...found, again};
}
