// The list of runs: filters, which are kept in the address, and rows that are renewed while the page is seen.
import { call, logIn, LoggedOut, newKey, Unreachable, url } from "./api.js";
import { short } from "./chart.js";
import { $, errorIn, html, say } from "./dom.js";

const RENEW_MS = 3000;
const ROWS = 50;
const FILTERS = ["text", "algorithm", "state"];
const MOMENT = { dateStyle: "short", timeStyle: "short" };

const chosen = new Set(new URLSearchParams(location.search).getAll("run")); // runs to compare, by id
let limit = ROWS;
let shownJobs = "";
let asked = 0; // number of the last request: an answer to an earlier one is late

async function refresh() {
  const query = new URLSearchParams({ limit });
  for (const name of FILTERS) if ($(name).value) query.set(name, $(name).value);
  const mine = ++asked;
  refreshJobs();
  try {
    const found = await call("GET", `runs?${query}`);
    if (mine === asked) show(found);
  } catch (error) {
    if (error instanceof LoggedOut) logIn();
    if (mine === asked) $("status").textContent = `The list is old: ${error.message}`;
  }
}

function show({ rows, num_matching: matching, algorithms, num_read: read, num_found: found }) {
  for (const name of algorithms) {
    if (![...$("algorithm").options].some(({ value }) => value === name)) $("algorithm").append(new Option(name));
  }
  const words = `${matching === read ? "" : `${matching} of `}${read} ${read === 1 ? "run" : "runs"}`;
  say(read < found ? `${words}; ${found - read} more are being read.` : `${words}.`);
  showRows(rows);
  $("table").hidden = rows.length === 0;
  $("more").hidden = matching <= rows.length || limit >= 1000;
}

/** Rows stay where they are as long as they say the same: a click on one that is replaced meanwhile would be lost. */
function showRows(runs) {
  const focused = document.activeElement?.closest("tr")?.dataset.run;
  const kind = document.activeElement?.localName;
  const known = new Map([...$("rows").children].map((element) => [element.dataset.facts, element]));
  const wanted = runs.map((run) => known.get(JSON.stringify(run)) ?? row(run));
  if (wanted.length === $("rows").childElementCount && wanted.every((element, at) => element === $("rows").children[at])) return;
  $("rows").replaceChildren(...wanted);
  if (focused) document.querySelector(`tr[data-run="${focused}"] ${kind}`)?.focus();
}

/** The runs that wait, start, or failed before they had a folder; rows are kept while they are the same. */
async function refreshJobs() {
  if (!$("jobs-part")) return;
  const { jobs } = await call("GET", "jobs").catch(() => ({ jobs: null }));
  if (!jobs || JSON.stringify(jobs) === shownJobs) return;
  shownJobs = JSON.stringify(jobs);
  const [open, failed] = [jobs.filter(({ state }) => OPEN.includes(state)), jobs.filter(({ state }) => !OPEN.includes(state))];
  for (const [id, shown] of [["jobs", open], ["failed", failed]]) {
    $(id).replaceChildren(...shown.map(jobCard));
    $(`${id}-part`).hidden = !shown.length;
  }
}

const OPEN = ["queued", "starting", "running", "stopping"];

function jobCard(job) {
  const isOpen = OPEN.includes(job.state);
  const act = (words, method, path) => {
    const button = html("button", { type: "button", "aria-label": `${words} ${job.name}` }, words);
    button.addEventListener("click", () => call(method, path).then(refreshJobs, (error) => say(error.message, true)));
    return button;
  };
  const isRun = job.wanted.algorithm !== "compare_algorithms";
  const again = isRun ? html("a", { class: "button", href: url(`runs/new?again=${job.id}`), "aria-label": `Change ${job.name} and start it again` }, "Change and start again") : null;
  const buttons = isOpen ? [act("Stop", "POST", `jobs/${job.id}/stop`)] : [again, act("Dismiss", "DELETE", `jobs/${job.id}`)];
  return html(
    "div",
    { class: "card", "data-job": job.id },
    html("p", {}, html("strong", { dir: "auto" }, job.name), ` ${job.state} `),
    isOpen || !job.output ? null : html("pre", { class: "passage raw" }, errorIn(job.output) || job.output),
    html("p", { class: "token" }, html("code", {}, job.command)),
    html("p", { class: "tools" }, ...buttons.filter(Boolean)),
  );
}

function row(run) {
  const steps = run.steps === null && !run.step ? "" : `${run.step}/${run.steps ?? "?"}`;
  const figure = run.figure === null ? "" : `${run.figure_name} ${short(run.figure)}`;
  const cells = [run.algorithm, run.model, run.state, steps, figure, run.minutes?.toFixed(1) ?? ""];
  const started = run.started === null ? "" : new Date(run.started * 1000).toLocaleString([], MOMENT);
  const tick = html("input", { type: "checkbox", "aria-label": `Compare ${run.title || run.name}`, checked: chosen.has(run.id) });
  tick.addEventListener("change", () => choose(run.id, tick.checked));
  return html(
    "tr",
    { "data-run": run.id, "data-state": run.state, "data-facts": JSON.stringify(run) },
    html("td", {}, tick),
    html("th", { scope: "row", title: run.note || null }, html("a", { href: url(`runs/${run.id}`), dir: "auto" }, run.title || run.name), run.title ? html("div", { class: "muted", dir: "auto" }, run.name) : null, tags(run)),
    ...[...cells, started].map((text) => html("td", {}, text)),
  );
}

function tags(run) {
  return run.tags.length ? html("ul", { class: "tags", "aria-label": "Tags" }, ...run.tags.map((tag) => html("li", { dir: "auto" }, tag))) : null;
}

function choose(id, isChosen) {
  if (isChosen) chosen.add(id);
  else chosen.delete(id);
  showChosen();
}

function showChosen() {
  $("compare").hidden = chosen.size === 0;
  $("compare").href = url(`compare?${new URLSearchParams([...chosen].map((id) => ["run", id]))}`);
  $("compare").textContent = chosen.size === 1 ? "Compare with others: tick them" : `Compare ${chosen.size} runs`;
}

// The comparison of algorithms, a run of its own

let startKey = newKey(); // of the request, until it is known to have come

async function startComparison() {
  const settings = ["model", "seeds", "steps"].map((name) => [name, $(`algorithms-${name}`).value]);
  try {
    await call("POST", "jobs", { algorithm: "compare_algorithms", settings }, startKey);
    $("asked").textContent = "The comparison starts when no other run trains.";
    startKey = newKey();
  } catch (error) {
    $("asked").textContent = error instanceof Unreachable ? `It is not known whether it will start; try again: ${error.message}` : error.message;
    if (!(error instanceof Unreachable)) startKey = newKey();
  }
  refresh();
}

function filter() {
  limit = ROWS;
  const query = new URLSearchParams();
  for (const name of FILTERS) if ($(name).value) query.set(name, $(name).value);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  refresh();
}

$("algorithms")?.addEventListener("click", () => {
  $("algorithms-dialog").returnValue = "";
  $("algorithms-dialog").showModal();
});
$("algorithms-dialog")?.addEventListener("close", ({ target }) => target.returnValue === "yes" && startComparison());
const given = new URLSearchParams(location.search);
if (given.get("algorithm")) $("algorithm").append(new Option(given.get("algorithm")));
for (const name of FILTERS) {
  $(name).value ||= given.get(name) ?? ""; // somebody may have typed before this ran
  $(name).addEventListener("input", filter);
}
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => {
  limit = Math.min(1000, limit + ROWS);
  refresh();
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
setInterval(() => document.hidden || refresh(), RENEW_MS);
showChosen();
refresh();
