// The page of a run, beside its charts: diagnosis, findings, samples, recipe, files.
import { call, newKey, Refused, Unreachable, url } from "./api.js";
import { short } from "./chart.js";
import { $, bytes, errorIn, html } from "./dom.js";
import { showJob as showJobState } from "./watch.js";

const { run } = $("run").dataset;
const RENEW_MS = 5000;
const SOON_MS = 700; // while the run starts or stops
const DELETE_MS = 300_000;
const CHANGING = ["queued", "starting", "stopping"];

let last = ""; // the facts as they were last shown
let facts = null;
let shownStep = null;
let follows = true; // the newest samples are shown until another step is chosen

async function refresh() {
  try {
    facts = await call("GET", `runs/${run}`);
  } catch (error) {
    // The state of the connection is shown by the watch page's part.
    if (error instanceof Refused && error.status === 404 && $("asked")) $("asked").textContent = "This run was deleted.";
    return;
  }
  if ($("label")) $("label").disabled = false; // a click before would do nothing
  showJobState({ status: facts.status, state: facts.job?.state, ask: refreshSoon });
  if (CHANGING.includes(facts.job?.state)) refreshSoon();
  if (JSON.stringify(facts) === last) return;
  last = JSON.stringify(facts);
  showFacts();
  showJob();
  showDiagnosis();
  showTables();
  showRecipe();
  showSteps();
}

let soon = null;

function refreshSoon() {
  soon ??= setTimeout(() => {
    soon = null;
    refresh();
  }, SOON_MS);
}

const cells = (texts) => html("tr", {}, ...texts.map((text, at) => html(at ? "td" : "th", at ? { class: "words" } : { scope: "row" }, text)));

function showFacts() {
  const { steps, minutes, verdict } = facts;
  const words = [steps === null ? null : `${steps} steps planned`, minutes === null ? null : `${minutes.toFixed(1)} minutes`];
  $("facts").textContent = words.filter(Boolean).join(" · ");
  $("verdict").textContent = verdict;
  showLabels();
  showFailure();
  $("commands").replaceChildren(
    ...Object.entries(facts.commands).map(([name, command]) => html("div", {}, html("dt", {}, name), html("dd", {}, html("code", {}, command)))),
  );
}

function showLabels() {
  const { title, note, tags } = facts.labels;
  const { folder } = $("run").dataset;
  $("run").textContent = title || folder;
  $("folder").hidden = !title;
  $("note").textContent = note;
  $("note").hidden = !note;
  $("tags").replaceChildren(...tags.map((tag) => html("li", { dir: "auto" }, tag)));
  $("tags").hidden = !tags.length;
  document.title = `${title || folder} · Tunesmith`;
}

/** Why the process of a run ended, as far as it said so: the error that it printed last. */
function showFailure() {
  const { job, status } = facts;
  const words = job && ["failed", "stopped"].includes(job.state) ? errorIn(job.output) : "";
  $("failure").hidden = !words;
  $("failure-title").textContent = status === "stopped" ? "The last start of this run failed." : "This run failed.";
  $("failure-text").textContent = words;
}

// Stop and resume, of runs that were started from the pages

let resumeKey = newKey(); // of the request to resume, until it is known to have come

function showJob() {
  if (!$("stop")) return;
  const { job, status } = facts;
  const isOpen = [...CHANGING, "running"].includes(job?.state);
  $("stop").hidden = !isOpen || job.state === "stopping";
  $("resume").hidden = isOpen || status !== "stopped";
  $("delete").hidden = isOpen || status === "running";
  $("job-part").hidden = !job;
  $("job-command").textContent = job?.command ?? "";
  $("job-output").textContent = job?.output ?? "";
  if (job?.state === "queued") $("asked").textContent = `The run waits for its turn; ${job.num_before} before it.`;
  else if ($("asked").textContent.startsWith("The run waits")) $("asked").textContent = "";
}

async function stop() {
  await ask(() => call("POST", `jobs/${facts.job.id}/stop`), "The run was asked to stop; it finishes its step and saves.");
}

async function resume() {
  const steps = $("resume-steps").valueAsNumber || null;
  await ask(() => call("POST", `runs/${run}/resume`, { steps: steps === facts.steps ? null : steps }, resumeKey), "The run goes on.");
}

/** Send a request and tell how it went; after a lost answer to a start it is sent again with the same key. */
async function ask(send, done) {
  try {
    await send();
    $("asked").textContent = done;
    resumeKey = newKey();
  } catch (error) {
    $("asked").textContent = error instanceof Unreachable ? `It is not known whether that was done; try again: ${error.message}` : error.message;
    if (!(error instanceof Unreachable)) resumeKey = newKey();
  }
  refresh();
}

async function saveLabels() {
  const labels = { title: $("label-name").value.trim(), note: $("label-note").value, tags: $("label-tags").value.split(",") };
  await ask(() => call("PUT", `runs/${run}/labels`, labels), "Saved.");
}

async function deleteRun() {
  $("asked").textContent = "Deleting.";
  try {
    await call("DELETE", `runs/${run}`, undefined, undefined, DELETE_MS);
    location.assign(url("runs"));
  } catch (error) {
    $("asked").textContent = error.message;
  }
}

if ($("stop")) {
  for (const [id, act] of [["stop", stop], ["resume", resume], ["label", saveLabels], ["delete", deleteRun]]) {
    const dialog = $(`${id}-dialog`);
    $(id).addEventListener("click", () => {
      $("resume-steps").value = facts.steps ?? "";
      const { title, note, tags } = facts.labels;
      [$("label-name").value, $("label-note").value, $("label-tags").value] = [title, note, tags.join(", ")];
      $("delete-size").textContent = `, ${bytes(facts.num_bytes)}`;
      dialog.returnValue = "";
      dialog.showModal();
    });
    dialog.addEventListener("close", () => dialog.returnValue === "yes" && act());
  }
}

function showDiagnosis() {
  $("causes").replaceChildren(
    ...facts.causes.map(([symptom, saving, evidence, advice], at) =>
      html("div", { class: "card" }, html("p", {}, html("strong", {}, symptom)), html("p", {}, advice), html("p", { class: "muted" }, `Could save ${saving}. ${evidence}`), follow(symptom, facts.advised[at])),
    ),
  );
  $("missing").replaceChildren(...facts.missing.map((text) => html("li", {}, text)));
  $("missing-part").hidden = !facts.missing.length;
}

/** A link to the form of a new run with the recipe of this one and the settings that a cause advises. */
function follow(symptom, advised) {
  if (!$("clone") || !advised.length) return null;
  const query = new URLSearchParams([["like", run], ...advised.map((pair) => ["set", pair.join("=")])]);
  return html("p", {}, html("a", { class: "button", href: url(`runs/new?${query}`), "aria-label": `Clone with this advice: ${symptom}` }, "Clone with this advice"));
}

function showTables() {
  $("findings").replaceChildren(...[...facts.findings].reverse().map(cells));
  $("findings-part").hidden = !facts.findings.length;
  $("findings-title").textContent = `Findings (${facts.num_findings})`;
  $("to-findings").textContent = facts.num_findings === 1 ? "1 finding" : `${facts.num_findings} findings`;
  $("to-findings").hidden = !facts.num_findings;
  const link = ([name, size]) => [html("a", { href: url(`runs/${run}/files/${encodeURIComponent(name)}`) }, name), `${size.toLocaleString()} bytes`];
  for (const [id, rows] of [["result", facts.result], ["environment", facts.environment], ["files", facts.files.map(link)]]) {
    $(id).replaceChildren(...rows.map(cells));
    $(`${id}-part`).hidden = !rows.length;
  }
}

function showRecipe() {
  const wanted = facts.recipe.filter(([, , origin]) => !$("only-set").checked || origin !== "default");
  $("recipe").replaceChildren(...wanted.map(cells));
  // A comparison of algorithms is started from the list of runs.
  if ($("clone")) $("clone").hidden = facts.recipe.some(([key]) => key.startsWith("comparison."));
}

// Samples

function showSteps() {
  const { sample_steps: steps } = facts;
  $("no-samples").hidden = steps.length > 0;
  $("sample-tools").hidden = steps.length === 0;
  $("sample-place").max = Math.max(0, steps.length - 1);
  if (follows) $("sample-place").value = steps.length - 1;
  showSamples();
}

async function showSamples() {
  const step = facts.sample_steps[Number($("sample-place").value)];
  $("sample-step").textContent = step ?? "";
  if (step === undefined || step === shownStep) return;
  shownStep = step;
  let found;
  try {
    found = await call("GET", `runs/${run}/samples?step=${step}`);
  } catch {
    shownStep = null;
    return;
  }
  if (shownStep === step) $("samples").replaceChildren(...found.samples.map(sample));
}

function sample({ prompt, completion, reward, rewards, finish_reason: reason, num_tokens: tokens, tokens: parts }) {
  const words = [
    reward === null ? null : `reward ${short(reward)}`,
    ...rewards.map(([name, value]) => `${name} ${short(Number(value))}`),
    tokens === null ? null : `${tokens} tokens`,
    reason || null,
  ];
  return html(
    "article",
    { class: "card" },
    html("p", { class: "passage raw muted", dir: "auto" }, prompt),
    html("p", { class: "passage raw", dir: "auto" }, completion),
    html("p", { class: "muted" }, words.filter(Boolean).join(" · ")),
    parts.length ? tokenView(parts) : null,
  );
}

const SHADES = ["above 90 %", "above 50 %", "above 10 %", "above 1 %", "below"];

/** The tokens of a trajectory by turns, made when they are asked for. */
function tokenView(parts) {
  const view = html("details", { class: "tokens" }, html("summary", {}, "Tokens"));
  view.addEventListener("toggle", () => {
    const legend = SHADES.flatMap((words, shade) => [html("span", { class: `piece p${shade}` }, words), " "]);
    const shown = parts.flatMap(([title, isDrawn, tokens]) => [
      html("p", { class: "part" }, title),
      html("p", { class: isDrawn ? "pieces" : "pieces replied", dir: "auto", translate: "no" }, ...tokens.map(([text, shade, note]) => html("span", { class: isDrawn ? `piece p${shade}` : "", title: note }, text))),
    ]);
    view.append(html("p", { class: "muted" }, "Shaded by the model's log-prob: ", ...legend, "Point at a token for its figures."), ...shown);
  }, { once: true });
  return view;
}

$("only-set").addEventListener("input", () => facts && showRecipe());
$("sample-place").addEventListener("input", () => {
  follows = Number($("sample-place").value) === facts.sample_steps.length - 1;
  showSamples();
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
setInterval(() => document.hidden || refresh(), RENEW_MS);
refresh();
