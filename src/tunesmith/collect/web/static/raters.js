// The admin's page: raters, their statistics, and invitation links.
import { call, url } from "./api.js";
import { $, html } from "./dom.js";

const showStatus = (text) => ($("status").textContent = text);
const percent = (value) => (value === null || value === undefined ? "" : `${Math.round(100 * value)} %`);

async function refresh() {
  const [raters, stats] = await Promise.all([call("GET", "raters"), call("GET", "stats")]);
  const byId = new Map(stats.raters.map((one) => [one.rater_id, one]));
  $("rows").replaceChildren(...raters.map((rater) => row(rater, byId.get(rater.id))));
  const { alpha } = stats;
  $("agreement").textContent =
    alpha.value === null
      ? `Agreement (Krippendorff's alpha): ${alpha.reason}`
      : `Agreement (Krippendorff's alpha): ${alpha.value.toFixed(2)} over ${alpha.num} items`;
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
document.querySelector("#invite button").disabled = false;

attempt(async () => {});
