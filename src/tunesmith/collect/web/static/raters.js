// The admin's page: raters, their statistics, and invitation links.
import { call, url } from "./api.js";
import { $, html } from "./dom.js";

const showStatus = (text) => ($("status").textContent = text);
const percent = (value) => (value === null || value === undefined ? "" : `${Math.round(100 * value)} %`);

const ENTRIES = 20;

async function refresh() {
  const [raters, stats, entries] = await Promise.all([call("GET", "raters"), call("GET", "stats"), call("GET", `audit?limit=${ENTRIES}`)]);
  showEntries(entries, []);
  const byId = new Map(stats.raters.map((one) => [one.rater_id, one]));
  $("rows").replaceChildren(...raters.map((rater) => row(rater, byId.get(rater.id))));
  const { alpha } = stats;
  $("agreement").textContent =
    alpha.value === null
      ? `Agreement (Krippendorff's alpha): ${alpha.reason}`
      : `Agreement (Krippendorff's alpha): ${alpha.value.toFixed(2)} over ${alpha.num} items`;
}

function showEntries(entries, before) {
  $("log").replaceChildren(...before, ...entries.map(entryRow));
  $("earlier").hidden = entries.length < ENTRIES;
  $("earlier").value = entries.at(-1)?.id ?? "";
}

function entryRow(entry) {
  const details = Object.entries(entry.detail).map(([name, value]) => `${name} ${value}`).join(", ");
  const cells = [new Date(1000 * entry.created_at).toLocaleString(), entry.who, entry.kind, entry.about ?? "", details];
  return html("tr", {}, ...cells.map((text) => html("td", {}, text)));
}

function row(rater, stats) {
  const cells = [rater.name, rater.role, stats?.num_votes ?? 0, percent(stats?.left.share), percent(stats?.gold_accuracy)];
  const button = html("button", { type: "button", "aria-label": `End the access of ${rater.name}` }, "End access");
  button.addEventListener("click", () => end(rater));
  return html("tr", {}, ...cells.map((text) => html("td", {}, text)), html("td", {}, rater.is_disabled ? "ended" : button));
}

async function end(rater) {
  if (!window.confirm(`End the access of ${rater.name}? Their votes stay.`)) return;
  await attempt(() => call("DELETE", `raters/${rater.id}`));
}

async function attempt(action) {
  try {
    await action();
    showStatus("");
    await refresh();
  } catch (error) {
    showStatus(error.message);
  }
}

$("invite").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(async () => {
    const made = await call("POST", "raters", { name: $("name").value.trim(), role: $("role").value });
    $("link").value = url(`join/${made.token}`);
    $("who").textContent = made.rater.name;
    $("made").hidden = false;
    $("name").value = "";
    $("link").select();
  });
});
$("earlier").addEventListener("click", async () => {
  const shown = [...$("log").children];
  try {
    showEntries(await call("GET", `audit?limit=${ENTRIES}&before=${$("earlier").value}`), shown);
  } catch (error) {
    showStatus(error.message);
  }
});
document.querySelector("#invite button").disabled = false;

attempt(async () => {});
