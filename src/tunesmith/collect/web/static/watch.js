// The watch page, and that of a run: live versions, votes and metrics.
import { ALL_POINTS, api, call, fetchSeries, logIn, LoggedOut } from "./api.js";
import { Line, LineChart, short } from "./chart.js";
import { $, html, oncePerFrame } from "./dom.js";
import { Feed } from "./feed.js";
import { BarChart, interval, percent, WinRateChart } from "./figures.js";
import { View } from "./view.js";

const { base } = $("watch").dataset; // prefix of the routes: empty, or that of a run
const STREAM = api(`${base}stream`);
const RETRY_MS = 2000;
const MAX_POINTS = 1200; // a longer line is replaced by one that the server has thinned
const ROWS_SHOWN = 60;
const MOMENT = { dateStyle: "short", timeStyle: "short" };

const lines = new Map(); // metric -> Line
const charts = new Map(); // picture -> LineChart
const view = new View();
const newest = new Map(); // metric -> { step, value }
const winRates = new WinRateChart();
const votes = new BarChart("votes", "Votes a minute", "last hour");
let cursor = 0;
let heldEvents = null; // events received while points are fetched
let mustReload = false;
let state = null;
let stateAt = 0;
let isConnected = false;
let job = null; // on the page of a run, see `showJob`
let versions = [];

// Points

/** Replace the points of the lines by fetched ones, which are at least as new. */
function replacePoints(series) {
  for (const { name, points } of series) {
    const line = lines.get(name);
    line.clear();
    for (const point of points) line.add(...point);
    if (line.last) newest.set(name, line.last);
  }
}

/** Run `work`, which fetches points, and hold back stream events until it ends, so that points stay in order. */
async function holdingEvents(work) {
  if (heldEvents) {
    mustReload = true;
    return;
  }
  heldEvents = [];
  mustReload = false;
  try {
    await work();
  } catch (error) {
    if (error instanceof LoggedOut) logIn();
    setTimeout(load, RETRY_MS);
  } finally {
    const events = heldEvents;
    heldEvents = null;
    for (const [event, data] of events) receive(event, data);
    for (const chart of charts.values()) chart.draw();
    if (mustReload) load();
  }
}

/** Load everything: metric names, charts, and all points. */
function load() {
  return holdingEvents(async () => {
    const found = await call("GET", `${base}metrics/names`);
    const shown = found.pictures.flatMap((picture) => picture.lines.map(({ name }) => name));
    const series = await fetchSeries(base, [...new Set([...shown, ...lines.keys()])]);
    cursor = Math.max(cursor, found.cursor);
    for (const name of found.names) if (!newest.has(name)) newest.set(name, null);
    for (const [name, [step, value]] of Object.entries(found.recent)) newest.set(name, { step, value });
    found.pictures.forEach(addChart);
    replacePoints(series);
    $("no-metrics").hidden = found.names.length > 0;
    showTable();
  });
}

/** Create the chart of a picture, or replace it if it has new lines. */
function addChart({ id, title, unit, is_main: isMain, lines: wanted }) {
  const known = charts.get(id);
  if (known && wanted.every(({ name }) => known.lines.some((line) => line.name === name))) return;
  const own = wanted.map(({ name, label }) => {
    if (!lines.has(name)) lines.set(name, new Line(name, label));
    return lines.get(name);
  });
  const chart = new LineChart(id, title, unit, own, view);
  chart.table = () => pointsOf(own);
  if (known) view.charts.delete(known);
  charts.set(id, chart);
  if (known) known.element.replaceWith(chart.element);
  else $(isMain ? "main-charts" : "more-charts").append(chart.element);
  $("more").hidden = !$("more-charts").childElementCount;
}

/** All points of lines as far as the server gives them, for a file. */
async function pointsOf(own) {
  const series = await fetchSeries(base, own.map(({ name }) => name), ALL_POINTS);
  return own.map(({ name, label }) => {
    const line = new Line(name, label);
    for (const point of series.find((one) => one.name === name).points) line.add(...point);
    return line;
  });
}

let reloadTimer = null;

function reloadSoon() {
  reloadTimer ??= setTimeout(() => {
    reloadTimer = null;
    load();
  }, 500);
}

// Events

function receive(event, data) {
  if (heldEvents && event !== "state") {
    heldEvents.push([event, data]);
    return;
  }
  if (event === "metrics") addRows(data);
  else if (event === "state") showState(data);
  else if (event === "versions") showVersions(data);
  else if (event === "votes") showVotes(data);
  else if (event === "reset") reloadSoon();
}

function addRows({ cursor: to, names, rows }) {
  cursor = to;
  const touched = new Set();
  for (const [id, step, time, place, value] of rows) {
    const name = names[place];
    if (!newest.has(name)) reloadSoon();
    newest.set(name, { step, value });
    const line = lines.get(name);
    if (line?.add(id, step, time, value)) touched.add(name);
    if (line?.points.length > MAX_POINTS) reloadSoon();
  }
  for (const chart of charts.values()) if (chart.lines.some(({ name }) => touched.has(name))) chart.draw();
  showTable();
}

// The trainer's state

const SENTENCES = {
  queued: "Waiting for its turn.",
  starting: "Starting.",
  stopping: "Stopping: the step is finished and a checkpoint written.",
  failed: "The run has failed.",
  none: "No trainer has written here yet.",
  running: "Training.",
  silent: "Training, but without a sign of life for a while.",
  dead: "The trainer has died.",
  finished: "The run has finished.",
  stopped: "The run has stopped.",
};

function showState(data) {
  state = data;
  stateAt = performance.now();
  updateState();
  if (job && isAlive() !== (job.status === "running")) job.ask();
}

const isAlive = () => ["running", "silent"].includes(state?.kind);

/**
 * What the page of a run knows of it: its `status`, and the `state` of its process. The stream is told some seconds
 * later, so where the two differ this counts, and `ask` is called to have it renewed.
 */
export function showJob(known) {
  job = known;
  updateState();
}

/** The kind of state to be shown. */
function kindOfState() {
  if (!job) return state.kind;
  if (["queued", "starting"].includes(job.state)) return job.state;
  if (job.status === "running") return job.state === "stopping" ? "stopping" : isAlive() ? state.kind : "running";
  return job.status === "stopped" && state?.kind === "dead" ? "dead" : job.status;
}

/** Show the state: a sentence, and separately the seconds, which screen readers do not announce. */
function updateState() {
  const kind = state || job ? kindOfState() : null;
  const sentence = !isConnected && state ? "The connection is lost; trying again." : SENTENCES[kind] ?? "Connecting.";
  $("indicator").dataset.kind = isConnected ? (kind ?? "none") : "lost";
  // Screen readers announce each assignment, so it is made for a new sentence only.
  if ($("sentence").textContent !== sentence) $("sentence").textContent = sentence;
  const parts = [];
  if (state?.doing && kind === state.kind) parts.push(state.doing);
  if (state?.step) parts.push(`step ${state.step}`);
  if (state?.age_s !== null && state?.age_s !== undefined) {
    parts.push(`last sign of life ${age(state.age_s + (performance.now() - stateAt) / 1000)} ago`);
  }
  $("details").textContent = parts.join(" · ");
  $("hint").hidden = !isConnected || !["dead", "stopped"].includes(kind);
}

function age(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// Votes and versions

function showVotes({ per_minute: perMinute, total, last_minutes: recent }) {
  votes.show(perMinute);
  $("total-votes").textContent = `${total} votes, ${short(recent)} a minute over the last five.`;
  if (total) $("versions-part").hidden = false;
}

function showVersions(data) {
  versions = data.versions.map((one) => ({ ...one, shown: one.from_votes?.win_rate == null ? one.measured : one.from_votes }));
  if (versions.length) $("versions-part").hidden = false;
  winRates.show(versions);
  const focused = document.activeElement?.closest("tr[data-version]")?.dataset.version;
  $("version-rows").replaceChildren(...[...versions].reverse().map(versionRow));
  if (focused) document.querySelector(`tr[data-version="${focused}"] button`)?.focus();
  $("no-versions").hidden = versions.length > 0;
  $("version-table").hidden = versions.length === 0;
}

function versionRow(one) {
  const served = one.serving ? "serving" : one.accepted ? "" : "turned down";
  const words = wordsOf(one);
  const button = html("button", { type: "button", "aria-label": words.title }, words.button);
  button.addEventListener("click", () => askBeforeRollback(one));
  const mark = one.learnt_deleted ? "learnt from data that was deleted since" : "";
  const told = [[served, one.note].filter(Boolean).join(": "), mark].filter(Boolean).join("; ");
  const rate = one.shown ? interval(one.shown) : one.from_votes?.note || "–";
  return html(
    "tr",
    { class: one.serving ? "serving" : null, "data-version": one.version },
    html("th", { scope: "row" }, String(one.version)),
    html("td", {}, new Date(one.created_at * 1000).toLocaleString([], MOMENT)),
    html("td", {}, rate),
    html("td", {}, one.heldout_accuracy === null ? "–" : percent(one.heldout_accuracy)),
    html("td", {}, one.kl === null ? "–" : short(Math.max(0, one.kl))),
    html("td", {}, String(one.num_votes)),
    html("td", { class: "words" }, told || "–"),
    "mayRollBack" in $("watch").dataset ? html("td", {}, one.serving || !one.accepted ? null : button) : null,
  );
}

/** The words of the button that has a version served: one that was only tried is not gone back to. */
function wordsOf({ version, is_only_tried: isOnlyTried }) {
  if (isOnlyTried) return { button: "Serve", title: `Serve version ${version}`, effect: "serve that version to everybody" };
  return { button: "Roll back", title: `Roll back to version ${version}`, effect: "serve that version again" };
}

function askBeforeRollback(one) {
  const dialog = $("rollback");
  const { button, title, effect } = wordsOf(one);
  $("rollback-title").textContent = `${title}?`;
  $("rollback-effect").textContent = `The trainer will ${effect} and go on from its weights. Votes stay, and no version is removed.`;
  $("rollback-yes").textContent = button;
  dialog.dataset.version = one.version;
  dialog.returnValue = "";
  dialog.showModal();
}

async function rollBack(version) {
  const answer = $("rollback-done");
  try {
    await call("POST", `versions/${version}/rollback`);
    answer.textContent = `The trainer was asked to serve version ${version}; it does so before its next update.`;
  } catch (error) {
    answer.textContent = `Version ${version} was not asked for: ${error.message}`;
  }
}

// The table of all metrics

let rowsShown = []; // { name, step, value, action } of each table row

/** Rows are kept while the same metrics are shown, to preserve the focus. */
const showTable = oncePerFrame(() => {
  if (!$("all-metrics").open) return;
  const wanted = $("search").value.trim().toLowerCase();
  const names = [...newest.keys()].filter((name) => name.toLowerCase().includes(wanted)).sort();
  const shown = names.slice(0, ROWS_SHOWN);
  if (shown.length !== rowsShown.length || shown.some((name, at) => name !== rowsShown[at].name)) {
    rowsShown = shown.map(metricRow);
    $("metric-rows").replaceChildren(...rowsShown.map(({ element }) => element));
  }
  for (const { name, step, value, action } of rowsShown) {
    const last = newest.get(name);
    step.textContent = last ? String(last.step) : "–";
    value.textContent = last ? short(last.value) : "–";
    if (charts.has(`own ${name}`)) action.textContent = "drawn";
  }
  $("metric-count").textContent =
    names.length > ROWS_SHOWN ? `${ROWS_SHOWN} of ${names.length} metrics; type to find others.` : `${names.length} metrics.`;
});

function metricRow(name) {
  const button = html("button", { type: "button", "aria-label": `Draw ${name}` }, "Draw");
  button.addEventListener("click", () => drawAlone(name));
  const [step, value, action] = [html("td"), html("td"), html("td", {}, button)];
  return { name, step, value, action, element: html("tr", {}, html("th", { scope: "row" }, name), step, value, action) };
}

async function drawAlone(name) {
  addChart({ id: `own ${name}`, title: name, unit: "", is_main: false, lines: [{ name, label: name }] });
  $("more").open = true;
  await holdingEvents(async () => replacePoints(await fetchSeries(base, [name])));
  showTable();
}

// The page

const feed = new Feed(STREAM, {
  cursor: () => cursor,
  receive,
  connected(isOpen) {
    isConnected = isOpen;
    updateState();
  },
  refused: () => load(),
});

async function resume() {
  if (document.hidden) return;
  feed.listen();
  await load();
  feed.start();
}

$("vote-chart").append(votes.element);
$("win-chart").append(winRates.element);
$("search").addEventListener("input", showTable);
$("all-metrics").addEventListener("toggle", showTable);
$("rollback").addEventListener("close", ({ target }) => {
  if (target.returnValue === "yes") rollBack(target.dataset.version);
});
document.addEventListener("visibilitychange", () => (document.hidden ? feed.stop() : resume()));
window.addEventListener("pagehide", () => feed.stop());
window.addEventListener("pageshow", ({ persisted }) => persisted && resume());
setInterval(updateState, 1000);
resume();
