// What the views ask the gateway, and what it tells by itself.
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
// All pages of a list, one after the other.
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

// Who sees some virtual hosts alone is not told the state of the gateway: its views ask anew as often.
export function listenAlone() { setInterval(() => { for (const one of listeners) one(null); }, 2000); }

// The state of the gateway comes by itself, every two seconds; who is shown something that is not in it asks anew then.
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

// What `ask` finds, asked anew when the gateway says that time has passed, and by `again`.
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
