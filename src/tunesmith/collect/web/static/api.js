// Requests to this server, and the three errors that callers distinguish.

/** The server refused the request; a retry would not help. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The server was not reached, or is busy; a retry may help. */
export class Unreachable extends Error {}

/** The session has ended. */
export class LoggedOut extends Error {}

// The root of this server, below whatever path prefix a proxy serves it.
const ROOT = new URL("../", import.meta.url);
const TIMEOUT_MS = 15_000;
const POINTS = 600; // of each metric
export const ALL_POINTS = 5_000; // the most that the server sends
const NAMES_PER_REQUEST = 40;

/** The address of a page or file of this server; `path` has no slash at its beginning. */
export const url = (path) => new URL(path, ROOT).href;

/** The address of a route of the interface. */
export const api = (path) => url(`api/v1/${path}`);

/** Go to the login page, which comes back here. */
export function logIn() {
  const here = location.href.startsWith(ROOT.href) ? location.href.slice(ROOT.href.length) : "";
  location.assign(url(`login?next=${encodeURIComponent(here)}`));
}

/** JSON of the response, null if it has none. `key` identifies the request, which makes retries harmless. */
export async function call(method, path, body, key, timeoutMs = TIMEOUT_MS) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers["Idempotency-Key"] = key;
  let response;
  let text;
  try {
    response = await fetch(api(path), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      signal: AbortSignal.timeout(timeoutMs),
    });
    text = await response.text();
  } catch (error) {
    throw new Unreachable(error.message);
  }
  if (response.ok) return text ? JSON.parse(text) : null;
  const detail = detailOf(text) || `the server answered ${response.status}`;
  if (response.status === 401) throw new LoggedOut(detail);
  if (response.status >= 500 || response.status === 429 || response.status === 408) throw new Unreachable(detail);
  throw new Refused(response.status, detail);
}

/** Points of metrics, thinned by the server; `base` is the prefix of a run's routes. */
export async function fetchSeries(base, names, points = POINTS) {
  const found = [];
  for (let start = 0; start < names.length; start += NAMES_PER_REQUEST) {
    const query = new URLSearchParams({ points });
    for (const name of names.slice(start, start + NAMES_PER_REQUEST)) query.append("name", name);
    found.push(...(await call("GET", `${base}metrics?${query}`)).series);
  }
  return found;
}

/** A random idempotency key. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function detailOf(text) {
  try {
    return JSON.parse(text).detail;
  } catch {
    return "";
  }
}
