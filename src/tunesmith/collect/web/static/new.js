// The form of a new run: a recipe checked while it is typed, an estimate, and the start, which is asked for once.
import { call, logIn, LoggedOut, newKey, Unreachable, url } from "./api.js";
import { $, bytes, html, say } from "./dom.js";

const QUIET_MS = 300; // after the last key, until the recipe is checked
const RENEW_MS = 1000;
const ESTIMATE_MS = 300_000;
const FIELDS = ["level", "model", "data", "reward", "steps", "name"];

let checks = 0; // number of the last check: an answer to an earlier one is late
let timer = null;
let key = newKey(); // of the run that the form asks for, until it is known to be there

// The recipe

const keyOf = (field) => field.closest("[data-key]").dataset.key;

/** [key, value] of everything that is filled in. */
function settings() {
  const rows = [...$("settings").children].map((row) => [...row.querySelectorAll("input")].map(({ value }) => value.trim()));
  const fields = FIELDS.filter((id) => !$(id).closest(".field").hidden).map((id) => [keyOf($(id)), $(id).value.trim()]);
  return [...fields, ...rows].filter(([name, value]) => name && value);
}

const request = () => ({ algorithm: $("algorithm").value, recipe: $("recipe").value, settings: settings() });

function addRow(name = "", value = "") {
  const id = `setting-${$("settings").childElementCount}`;
  const problem = html("p", { class: "problem", id: `${id}-problem` });
  const describes = { autocomplete: "off", spellcheck: "false", "aria-describedby": problem.id };
  const keyInput = html("input", { list: "keys", "aria-label": "Key", placeholder: "optimizer.learning_rate", maxlength: 200, ...describes });
  const valueInput = html("input", { "aria-label": "Value", maxlength: 10000, ...describes });
  [keyInput.value, valueInput.value] = [name, value];
  const row = html("div", { class: "setting" }, keyInput, valueInput, problem);
  $("settings").append(row);
  return keyInput;
}

/** The recipes and keys of the algorithm, and the name of its data. */
async function useAlgorithm() {
  const algorithm = $("algorithm").value;
  for (const option of $("recipe").options) option.hidden = option.disabled = Boolean(option.value) && option.dataset.algorithm !== algorithm;
  if ($("recipe").selectedOptions[0]?.disabled) $("recipe").value = "";
  const keys = await call("GET", `recipes/keys?algorithm=${algorithm}`);
  if ($("algorithm").value !== algorithm) return;
  $("keys").replaceChildren(...keys.map(([path, type, preset]) => html("option", { value: path }, `${type}; ${preset}`)));
  const source = keys.find(([path]) => /^(prompts|pairs|demonstrations)\.source$/.test(path))[0];
  $("data").closest(".field").dataset.key = source;
  document.querySelector("label[for=data]").textContent = `Data (${source.split(".")[0]})`;
  $("reward").closest(".field").hidden = !keys.some(([path]) => path === "reward.0.source");
}

// The check

async function check() {
  const mine = ++checks;
  try {
    const { problems, command, presets } = await call("POST", "recipes/check", request());
    if (mine !== checks) return;
    showPresets(presets);
    $("command").textContent = command;
    showProblems(problems);
  } catch (error) {
    if (mine === checks) fail(error);
  }
}

/** In each empty field what the run has there if it stays empty: by the recipe and the level, or by default. */
function showPresets(presets) {
  for (const field of FIELDS.map($).filter(({ localName }) => localName === "input")) {
    const preset = presets[keyOf(field)];
    field.placeholder = preset === undefined || preset === null ? "" : String(preset);
  }
}

/** Each problem at the field of its key, the others below all of them. */
function showProblems(problems) {
  const rows = [...$("settings").children].map((row) => [row.querySelector("input").value.trim(), row]);
  const fields = [...document.querySelectorAll(".field[data-key]")].filter(({ hidden }) => !hidden).map((field) => [field.dataset.key, field]);
  const places = new Map([...fields, ...rows]);
  for (const problem of document.querySelectorAll(".problem")) problem.textContent = "";
  for (const [name, message] of problems) {
    const place = places.get(name)?.querySelector(".problem");
    (place ?? $("problems")).textContent += `${place || !name ? "" : `${name}: `}${message}\n`;
  }
  for (const input of document.querySelectorAll("[aria-describedby$=-problem]")) {
    input.setAttribute("aria-invalid", String(Boolean($(input.getAttribute("aria-describedby")).textContent)));
  }
}

function fail(error) {
  if (error instanceof LoggedOut) logIn();
  say(error.message, true);
}

// The estimate

const GB = 1e9;
/** Sizes in GB, the largest first; those that do not count are left out. */
function sizes(parts) {
  const total = Object.values(parts).reduce((sum, size) => sum + size, 0);
  const shown = Object.entries(parts).filter(([, size]) => size > total / 200).sort(([, a], [, b]) => b - a);
  return shown.map(([name, size]) => `${name} ${bytes(size * GB)}`).join(", ");
}
const minutes = (seconds) => (seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.ceil(seconds / 60)} min`);
const fact = ([name, text]) => html("div", {}, html("dt", {}, name), html("dd", { class: "passage raw" }, text));

async function estimate() {
  say("Loading model and data for the estimate.");
  $("facts").replaceChildren();
  try {
    const facts = await call("POST", "recipes/estimate", request(), null, ESTIMATE_MS);
    const total = Object.values(facts.memory_gb).reduce((sum, size) => sum + size, 0);
    const heldOut = facts.num_heldout ? `, ${facts.num_heldout.toLocaleString()} held out` : "";
    say("The estimate:");
    $("facts").replaceChildren(
      ...[
        ["model", `${facts.num_parameters.toLocaleString()} parameters`],
        ["memory", `${bytes(total * GB)}: ${sizes(facts.memory_gb)}`],
        ["by stage", sizes(facts.stage_gb)],
        ["time", `about ${minutes(facts.seconds)} for ${facts.num_steps} steps`],
        ["data", `${facts.num_items.toLocaleString()} items to train on${heldOut}, for example:\n${facts.sample}`],
      ].map(fact),
    );
  } catch (error) {
    fail(error);
  }
}

// The start

async function start() {
  $("start").disabled = true;
  try {
    const job = await call("POST", "jobs", request(), key);
    history.replaceState(null, "", `?job=${job.id}`);
    key = newKey();
    await follow(job);
  } catch (error) {
    // The same key is sent again after a lost answer, so that no second run begins.
    if (error instanceof Unreachable) say(`It is not known whether the run was started; press the button again: ${error.message}`, true);
    else {
      key = newKey();
      fail(error);
    }
  }
  $("start").disabled = false;
}

const WORDS = { starting: "The run is starting; its page opens by itself.", cancelled: "The run was not started.", failed: "The run has failed." };

/** Wait for the page of a job's run, and go there. */
async function follow(job) {
  for (;;) {
    if (job.run) return location.assign(url(`runs/${job.run}`));
    say(job.state === "queued" ? `The run waits for its turn; ${job.num_before} before it.` : (WORDS[job.state] ?? "The run has begun."), job.state === "failed");
    $("output").textContent = job.output;
    $("output").hidden = !job.output;
    if (["cancelled", "failed"].includes(job.state)) return;
    await new Promise((done) => setTimeout(done, RENEW_MS));
    try {
      job = await call("GET", `jobs/${job.id}`);
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
    }
  }
}

// The page

function changed() {
  clearTimeout(timer);
  timer = setTimeout(check, QUIET_MS);
}

/** Fill the form with what a run was started with. */
async function copy({ algorithm, recipe = "", settings: given }) {
  $("algorithm").value = algorithm;
  if (!$("algorithm").value) throw new Error(`A run of ${algorithm} cannot be started here.`);
  $("recipe").value = recipe;
  await useAlgorithm();
  for (const [name, value] of given) set(name, value);
}

/** Fill the field or the row of a key, or add a row. */
function set(name, value) {
  const field = FIELDS.map($).find((one) => keyOf(one) === name);
  const row = [...$("settings").children].map((one) => one.querySelectorAll("input")).find(([input]) => input.value === name);
  if (field) field.value = value;
  else if (row) row[1].value = value;
  else addRow(name, value);
}

$("form").addEventListener("input", changed);
$("algorithm").addEventListener("input", () => useAlgorithm().catch(fail));
$("add").addEventListener("click", () => addRow().focus());
$("estimate").addEventListener("click", estimate);
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("command").textContent).then(() => say("Copied."), fail));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});

const asked = new URLSearchParams(location.search);
try {
  if (asked.get("like")) await copy(await call("GET", `runs/${encodeURIComponent(asked.get("like"))}/settings`));
  else if (asked.get("again")) await copy((await call("GET", `jobs/${encodeURIComponent(asked.get("again"))}`)).wanted);
  else await useAlgorithm();
  for (const given of asked.getAll("set")) set(given.slice(0, given.indexOf("=")), given.slice(given.indexOf("=") + 1));
} catch (error) {
  fail(error);
}
check();
for (const id of ["add", "estimate", "start"]) $(id).disabled = false;
$("copy").disabled = !navigator.clipboard;
if (asked.get("job")) call("GET", `jobs/${encodeURIComponent(asked.get("job"))}`).then(follow).catch(fail);
