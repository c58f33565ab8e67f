// The admin's page: raters, their statistics, and invitation links.
import { call, url } from "./api.js";
import { $, html } from "./dom.js";

const showStatus = (text) => ($("status").textContent = text);
const percent = (value) => (value === null || value === undefined ? "" : `${Math.round(100 * value)} %`);

const ENTRIES = 20;

async function refresh() {
  const [raters, stats, crowd, entries] = await Promise.all([call("GET", "raters"), call("GET", "stats"), call("GET", "raters/estimates"), call("GET", `audit?limit=${ENTRIES}`)]);
  showEntries(entries, []);
  const estimates = new Map(crowd.raters.map((one) => [one.rater_id, one]));
  const byId = new Map(stats.raters.map((one) => [one.rater_id, one]));
  const users = Map.groupBy(raters.filter((rater) => rater.user_of !== null), (rater) => rater.user_of);
  const rows = raters.filter((rater) => rater.user_of === null).flatMap((rater) => {
    const own = users.get(rater.id) ?? [];
    return [row(rater, byId.get(rater.id), estimates.get(rater.id)), ...(own.length ? [usersRow(rater, own, byId)] : [])];
  });
  $("rows").replaceChildren(...rows);
  $("worth").textContent =
    crowd.effective === null
      ? "What votes are worth: too few of them can be compared, on pairs with several votes or known answers."
      : `The newest ${crowd.num_votes} votes that prefer an answer say as much as ${Math.round(crowd.effective)} without an error.`;
  $("agreement").textContent = `Agreement (Krippendorff's alpha): ${agreement(stats.alpha)}`;
  const asked = stats.asked.map((one) => `${one.method || "no choice"}: ${one.num_votes} votes, agreement ${agreement(one.alpha)}`);
  $("asked").textContent = `Why pairs were asked. ${asked.join("; ")}. What a method chose is no sample of all pairs: look at random.`;
  $("asked").hidden = !asked.length;
}

const agreement = ({ value, num, reason }) => (value === null ? reason : `${value.toFixed(2)} over ${num} items`);

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

/** What a rater is, in a word or two. */
function roleOf({ role, scopes, is_machine }) {
  if (is_machine) return "judge (a machine)";
  if (scopes === null) return role;
  return scopes.includes("admin") ? "admin's key" : "key";
}

/** The users of a key in one row: there may be many, and their access is that of the key. */
function usersRow(key, users, byId) {
  const num = users.reduce((sum, { id }) => sum + (byId.get(id)?.num_votes ?? 0), 0);
  const count = users.length === 1 ? "1 user" : `${users.length} users`;
  const cells = [`${count} of the key ${key.name}`, "", num, "", "", "", "", "", key.is_disabled ? "ended" : "that of the key"];
  return html("tr", {}, ...cells.map((text) => html("td", {}, text)));
}

/** A share with its interval. */
const range = (share) => (share ? `${percent(share.value)} (${percent(share.low)} to ${percent(share.high)})` : "");

function row(rater, stats, estimate) {
  const worth = estimate?.effective?.toFixed(0) ?? "";
  const known = [range(estimate?.reliability), worth];
  const cells = [rater.name, roleOf(rater), stats?.num_votes ?? 0, percent(stats?.left.share), percent(stats?.gold_accuracy), ...known];
  const button = html("button", { type: "button", "aria-label": `End the access of ${rater.name}` }, "End access");
  button.addEventListener("click", () => end(rater));
  const notes = html("td", { class: "words" }, estimate?.notes.join("; ") ?? "");
  return html("tr", {}, ...cells.map((text) => html("td", {}, text)), notes, html("td", {}, rater.is_disabled ? "ended" : button));
}

async function end(rater) {
  const asked = rater.scopes === null ? `End the access of ${rater.name}?` : `End the key ${rater.name}, and the access of all its users?`;
  if (!window.confirm(`${asked} Votes stay.`)) return;
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
