// The page of several runs side by side: curves, reward against KL, and samples of the same prompts. The runs are in
// the address.
import { ALL_POINTS, call, fetchSeries, logIn, LoggedOut, url } from "./api.js";
import { Line, LineChart, short } from "./chart.js";
import { $, html, say } from "./dom.js";
import { FrontierChart } from "./figures.js";
import { View } from "./view.js";

const RENEW_MS = 5000;
const SOON_MS = 500; // as long as the server is still reading the metrics of a run
const MAX_RUNS = 8; // the number of colours
const MAX_CHARTS = 24;
const SAMPLE_STEPS = 6; // newest steps of each run in which the same prompts are sought
const MAX_PROMPTS = 20;
const REWARDS = ["eval/reward", "reward", "objective/scores"];
// What says how well a run did comes first, then what is trained on, the lengths, and the times.
const ORDER = [/^eval\/(?!samples)/, /^(reward|accuracy|objective\/scores)$/, /^rewards\/.*(mean|accurac|margin)/, /kl/, /loss/, /^(?!.*(time|memory|cpu|disk)\/)/];
const KLS = ["objective/kl", "kl", "kl_per_sequence"];
// Samples of one step, by the keys of a recipe; the product of those that it has.
const SIZES = ["rollout.prompts_per_step", "rollout.completions_per_prompt", "dpo.pairs_per_step", "reward_model.pairs_per_step", "sft.demonstrations_per_step"];

const ids = [...new Set(new URLSearchParams(location.search).getAll("run"))].slice(0, MAX_RUNS);
const runs = []; // { id, name, status, size, metrics, points, samples }
const charts = new Map(); // metric -> LineChart
const frontier = new FrontierChart();
const view = new View();
let axis = "step";

const AXES = {
  step: { name: "step", of: (_, { step }) => step },
  samples: { name: "sample", of: (run, { step }) => step * run.size },
  minutes: { name: "minute", of: (run, { time }) => (time - run.began) / 60 },
};

let isLoading = false;

/** Load what is new; a run that has ended is loaded until nothing is added any more. */
async function refresh() {
  if (isLoading || document.hidden) return;
  isLoading = true;
  const open = runs.filter(({ isWhole }) => !isWhole);
  const failures = await Promise.all(open.map((run) => load(run).then(() => null, (error) => error)));
  const failed = failures.filter(Boolean);
  if (failed.some((error) => error instanceof LoggedOut)) logIn();
  say(failed.length ? failed[0].message : runs.length > 1 ? "" : "Choose two runs or more in the list of runs.");
  if (open.length) draw();
  isLoading = false;
  if (open.some(({ status, isWhole }) => status && status !== "running" && !isWhole)) setTimeout(refresh, SOON_MS);
}

async function load(run) {
  const facts = await call("GET", `runs/${run.id}`);
  const recipe = new Map(facts.recipe.map(([key, value]) => [key, Number(value)]));
  run.name = facts.labels.title || facts.name;
  run.size = SIZES.reduce((size, key) => size * (recipe.get(key) || 1), 1);
  const { names, pictures, cursor } = await call("GET", `runs/${run.id}/metrics/names`);
  run.metrics = names;
  const main = pictures.filter((one) => one.is_main).flatMap((one) => one.lines.map(({ name }) => name));
  const wanted = [...new Set([...REWARDS, ...KLS, ...main, ...charts.keys()])].filter((name) => names.includes(name));
  for (const { name, points } of await fetchSeries(`runs/${run.id}/`, wanted)) {
    const line = new Line(name, run.name);
    for (const point of points) line.add(...point);
    run.points.set(name, line.points);
  }
  run.began = Math.min(...[...run.points.values()].filter((points) => points.length).map(([first]) => first.time));
  run.main = main;
  const steps = facts.sample_steps.slice(-SAMPLE_STEPS);
  const found = await Promise.all(steps.map((step) => call("GET", `runs/${run.id}/samples?step=${step}`)));
  run.samples = new Map(found.flatMap(({ step, samples }) => samples.map((one) => [one.prompt, { ...one, step }])));
  run.facts = facts;
  run.isWhole = facts.status !== "running" && cursor === run.cursor && (cursor > 0 || facts.num_steps === 0);
  run.cursor = cursor;
  run.status = facts.status;
}

function draw() {
  for (const name of [...new Set(runs.flatMap(({ main }) => main))].sort((a, b) => placeOf(a) - placeOf(b))) {
    if (!charts.has(name) && charts.size < MAX_CHARTS) addChart(name);
  }
  const others = [...new Set(runs.flatMap(({ metrics }) => metrics))].filter((name) => !charts.has(name)).sort();
  if ($("metric").options.length !== others.length + 1) $("metric").replaceChildren(new Option("draw another metric", ""), ...others.map((name) => new Option(name)));
  $("no-metrics").hidden = charts.size > 0;
  for (const chart of charts.values()) drawLines(chart);
  drawFrontier();
  showRuns();
  showSamples();
}

/** The place of a metric among the others. */
function placeOf(name) {
  const place = ORDER.findIndex((pattern) => pattern.test(name));
  return place < 0 ? ORDER.length : place;
}

function addChart(name) {
  const chart = new LineChart(name, name, "", runs.map((run) => new Line(name, run.label)), view);
  chart.table = () => pointsOf(chart);
  charts.set(name, chart);
  // Runs are read one after the other, so a chart that comes later may belong before others.
  const next = [...$("charts").children].find((element) => placeOf(element.dataset.metric) > placeOf(name));
  chart.element.dataset.metric = name;
  $("charts").insertBefore(chart.element, next ?? null);
}

/** All points of a chart as far as the server gives them, for a file. */
function pointsOf(chart) {
  return Promise.all(
    runs.map(async (run) => {
      const line = new Line(chart.id, run.label);
      const [found] = run.metrics.includes(chart.id) ? await fetchSeries(`runs/${run.id}/`, [chart.id], ALL_POINTS) : [];
      for (const point of found?.points ?? []) line.add(...point);
      return { label: run.label, points: line.points.map((point) => ({ ...point, step: AXES[axis].of(run, point) })) };
    }),
  );
}

function drawLines(chart) {
  const { name, of } = AXES[axis];
  chart.xName = name;
  chart.lines.forEach((line, place) => {
    const run = runs[place];
    line.points = (run.points.get(chart.id) ?? []).map((point) => ({ ...point, step: of(run, point) }));
  });
  chart.draw();
}

/** The reward of each run over its KL, at the steps that have both. */
function drawFrontier() {
  const missing = [];
  const paths = runs.map((run) => {
    const [reward, kl] = [REWARDS, KLS].map((names) => names.map((name) => run.points.get(name)).find((points) => points?.length));
    if (!reward || !kl) missing.push(run.label);
    const klAt = new Map((kl ?? []).map(({ step, value }) => [step, value]));
    return { label: run.label, points: (reward ?? []).map(({ step, value }) => ({ step, x: klAt.get(step) ?? null, y: value })) };
  });
  const isEmpty = paths.every(({ points }) => !points.some(({ x, y }) => x !== null && y !== null));
  $("frontier-part").hidden = isEmpty;
  if (!isEmpty) frontier.show(paths);
  $("no-frontier").hidden = !missing.length;
  $("no-frontier").textContent = `Without a KL and a reward at the same steps: ${missing.join(", ")}.`;
}

function showRuns() {
  $("rows").replaceChildren(
    ...runs.map((run) =>
      html(
        "tr",
        { "data-run": run.id },
        html("th", { scope: "row" }, html("a", { href: url(`runs/${run.id}`), dir: "auto" }, run.label)),
        ...[run.status ?? "not read", String(run.facts?.num_steps ?? "–"), run.facts?.minutes?.toFixed(1) ?? "–", run.facts?.verdict ?? ""].map((text) => html("td", { class: "words" }, text)),
        html("td", {}, html("a", { href: url(`compare?${queryOf(ids.filter((id) => id !== run.id))}`), "aria-label": `Leave out ${run.label}` }, "Leave out")),
      ),
    ),
  );
}

function showSamples() {
  const counts = new Map();
  for (const { samples } of runs) for (const prompt of samples.keys()) counts.set(prompt, (counts.get(prompt) ?? 0) + 1);
  const shared = [...counts].filter(([, count]) => count > 1).slice(0, MAX_PROMPTS);
  $("no-samples").hidden = shared.length > 0;
  $("samples").replaceChildren(...shared.map(([prompt]) => sample(prompt)));
}

function sample(prompt) {
  const said = runs.filter(({ samples }) => samples.has(prompt)).map((run) => {
    const { completion, reward, step } = run.samples.get(prompt);
    const words = [run.label, `step ${step}`, reward === null ? null : `reward ${short(reward)}`];
    return html("div", {}, html("p", { class: "muted", dir: "auto" }, words.filter(Boolean).join(" · ")), html("p", { class: "passage raw", dir: "auto" }, completion));
  });
  return html("article", { class: "card" }, html("p", { class: "passage raw muted", dir: "auto" }, prompt), html("div", { class: "grid two" }, ...said));
}

const queryOf = (some) => new URLSearchParams(some.map((id) => ["run", id]));

for (const id of ids) {
  runs.push({ id, status: null, isWhole: false, cursor: -1, name: "", size: 1, began: 0, metrics: [], main: [], points: new Map(), samples: new Map(), facts: null, get label() { return this.name || this.id; } });
}
$("frontier").append(frontier.element);
for (const input of document.querySelectorAll("input[name=axis]")) {
  input.addEventListener("change", () => {
    axis = input.value;
    view.change({ zoom: null, at: null });
    for (const chart of charts.values()) drawLines(chart);
  });
}
$("metric").addEventListener("change", ({ target }) => {
  if (!target.value) return;
  addChart(target.value);
  for (const run of runs) run.isWhole = false;
  refresh();
});
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, RENEW_MS);
refresh();
