// The vote page: shows queued presentations and sends votes, made by keys or buttons, through the outbox.
import { answer, LETTERS, passage, sourceButton, VERDICT_TEXTS } from "./answers.js";
import { logIn, LoggedOut, Refused } from "./api.js";
import { $, announce, controlOfKey, html } from "./dom.js";
import { Outbox } from "./outbox.js";
import { PresentationQueue } from "./presentations.js";
import { Ranking } from "./ranking.js";

const POLL_MS = 2_000;
const MAX_POLL_MS = 10_000;
// A key pressed twice must not vote on the next pair, which has just appeared.
const SETTLE_MS = 250;

const ROLES = { user: "User", assistant: "Assistant", system: "System" };

const main = $("content");
const queue = new PresentationQueue();
const history = [];
const seen = { token: null, since: 0, ms: 0 };
let ranking = null;
let isRaw = false;
let pollMs = POLL_MS;
let pollTimer = 0;
let isFilling = false;
let mustRefill = false;

const outbox = new Outbox({
  sent(request) {
    if (request.path.endsWith("/demonstration")) announce("Your answer is stored.");
    else if (request.method === "PUT") queue.settle(tokenOf(request.path));
    refill();
  },
  refused(request, error) {
    const token = tokenOf(request.path);
    // The retry of an undo whose response got lost is refused, because the undo is done.
    if (request.method === "DELETE" && request.tries > 1) return;
    announce(`Not counted: ${error.message}`, true);
    if (!request.path.endsWith("/demonstration")) {
      const wasShown = queue.current?.token === token;
      queue.drop(token);
      if (wasShown) show();
    }
    refill();
  },
  waiting: showUnsent,
  loggedOut: logIn,
});

/** Show how many requests wait to be sent; 0 hides the notice. */
function showUnsent(count) {
  $("unsent").hidden = count === 0;
  $("unsent").textContent = count
    ? `The server cannot be reached. ${count === 1 ? "One action is" : `${count} actions are`} kept here and sent as soon as it answers.`
    : "";
}

function showProgress(progress) {
  const votes = progress.num_votes === 1 ? "1 vote" : `${progress.num_votes} votes`;
  const limit = progress.max_votes ? ` of ${progress.max_votes}` : "";
  $("progress-text").textContent = `${votes}${limit} · ${progress.num_left} left`;
  $("done").max = Math.max(1, progress.num_votes + progress.num_left);
  $("done").value = progress.num_votes;
}

function tokenOf(path) {
  return path.split("/")[1];
}

/** Fill the queue, and show its first presentation if it is not shown yet. */
async function refill() {
  if (isFilling) {
    mustRefill = true;
    return;
  }
  isFilling = true;
  mustRefill = false;
  clearTimeout(pollTimer);
  try {
    showProgress(await queue.fill());
    if ((queue.current?.token ?? null) !== seen.token) show();
    $("nothing").hidden = Boolean(queue.current);
  } catch (error) {
    if (error instanceof LoggedOut) logIn();
    if (error instanceof Refused) announce(error.message, true);
  } finally {
    isFilling = false;
  }
  if (mustRefill) {
    refill();
  } else if (queue.current) {
    pollMs = POLL_MS;
  } else {
    pollTimer = setTimeout(() => (document.hidden ? 0 : refill()), pollMs);
    pollMs = Math.min(pollMs * 1.5, MAX_POLL_MS);
  }
}

function show() {
  const shown = queue.current;
  $("table").hidden = !shown;
  $("nothing").hidden = true; // Shown only when the server says so.
  main.dataset.state = "settling";
  seen.token = shown?.token ?? null;
  seen.ms = 0;
  seen.since = performance.now();
  ranking = shown?.kind === "ranking" ? new Ranking(shown.answers.length) : null;
  $("reason").value = "";
  if (!shown) return;
  paint();
  $("prompt").scrollTop = 0;
  window.scrollTo(0, 0);
  $("prompt-title").focus({ preventScroll: true });
  setTimeout(() => {
    if (queue.current === shown) main.dataset.state = "ready";
  }, SETTLE_MS);
}

/** Render the shown presentation, formatted or raw. */
function paint() {
  const shown = queue.current;
  $("prompt-source").replaceChildren(sourceButton(shown.prompt, isRaw) ?? "");
  $("prompt").replaceChildren(...shown.prompt.map(message));
  const { scrollHeight, scrollWidth, clientHeight, clientWidth } = $("prompt");
  $("prompt").tabIndex = scrollHeight > clientHeight || scrollWidth > clientWidth ? 0 : -1;
  const answers = $("answers");
  answers.dataset.count = shown.answers.length;
  answers.replaceChildren(...shown.answers.map((one, index) => answer(one, index, isRaw)));
  answers.classList.remove("fresh");
  void answers.offsetWidth; // Forces a reflow, which restarts the animation.
  answers.classList.add("fresh");
  $("pair-keys").hidden = ranking !== null;
  $("ranking-keys").hidden = ranking === null;
  document.querySelector('[data-verdict="both_bad"]').hidden = ranking !== null;
  if (ranking) addRankButtons();
}

/** A message of a conversation, or the whole prompt. */
function message(content) {
  const role = content.role ? html("div", { class: "role" }, ROLES[content.role] ?? content.role) : null;
  return html("div", { class: "message" }, role, passage(content, isRaw));
}

function addRankButtons() {
  document.querySelectorAll(".answer").forEach((article, index) => {
    const key = index + 1;
    const button = html("button", { type: "button", class: "place", "data-place": index, "aria-keyshortcuts": key });
    article.querySelector("header").append(button);
  });
  paintRanks();
}

function paintRanks() {
  if (!ranking) return;
  ranking.ranks.forEach((rank, index) => {
    const button = document.querySelector(`[data-place="${index}"]`);
    button.replaceChildren(html("kbd", {}, index + 1), rank === null ? " Place" : ` Place ${rank}`);
    button.setAttribute("aria-label", `Answer ${LETTERS[index]}: ${rank === null ? "no place yet" : `place ${rank}`}`);
    button.closest(".answer").classList.toggle("placed", rank !== null);
  });
  document.querySelector('[data-act="level"]').setAttribute("aria-pressed", String(ranking.isTie));
}

function dwell() {
  return Math.round(Math.min(seen.ms + (document.hidden ? 0 : performance.now() - seen.since), 86_400_000));
}

/** Queue a verdict or a ranking on the shown presentation, and show the next one at once. */
function send(what, body) {
  const presentation = queue.answer();
  history.push(presentation);
  if (history.length > 50) history.shift();
  outbox.add("PUT", `presentations/${presentation.token}/${what}`, body);
  announce(`Recorded: ${VERDICT_TEXTS[body.verdict ?? "ranked"]}.`);
  show();
  if (!queue.current) refill();
}

function vote(verdict) {
  if (main.dataset.state !== "ready" || !queue.current) return;
  if (ranking && verdict !== "skip") return;
  send("vote", { verdict, reason: $("reason").value.trim(), dwell_ms: dwell() });
}

const actions = {
  send() {
    if (main.dataset.state !== "ready" || !ranking) return;
    ranking.finish();
    paintRanks();
    if (!ranking.isComplete) return announce("Give every answer a place first.", true);
    send("ranking", { ranks: ranking.ranks, dwell_ms: dwell() });
  },
  level() {
    ranking?.toggleTie();
    paintRanks();
  },
  back() {
    ranking?.back();
    paintRanks();
  },
  undo() {
    const presentation = history.pop();
    if (!presentation) return announce("There is nothing to undo.");
    outbox.add("DELETE", `presentations/${presentation.token}/vote`);
    queue.takeBack(presentation);
    show();
    announce("Undone: vote again.");
  },
  write() {
    if (!queue.current) return;
    $("writing").dataset.token = queue.current.token;
    $("written").value = "";
    $("writing").showModal();
    $("written").focus();
  },
  "send-written"() {
    const text = $("written").value;
    if (!text.trim()) return $("written").focus();
    outbox.add("PUT", `presentations/${$("writing").dataset.token}/demonstration`, { text });
    $("writing").close();
    announce("Your answer is on its way.");
  },
  raw() {
    isRaw = !isRaw;
    if (queue.current) paint();
  },
  help() {
    $("help").showModal();
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { verdict, act, place } = button.dataset;
  if (verdict) vote(verdict);
  if (act) actions[act]();
  if (place !== undefined && ranking) {
    ranking.toggle(Number(place));
    paintRanks();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey && event.key === "Enter" && $("writing").open) return actions["send-written"]();
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
  if (event.target === $("reason")) {
    if (event.key === "Enter" || event.key === "Escape") $("reason").blur();
    return;
  }
  const onButton = event.key === "Enter" && event.target.closest("button, a, summary");
  if (onButton) return;
  const control = controlOfKey(event.key.length === 1 ? event.key.toLowerCase() : event.key);
  if (!control) return;
  event.preventDefault();
  if (control === $("reason")) control.focus();
  else control.click();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    seen.ms += performance.now() - seen.since;
  } else {
    seen.since = performance.now();
    refill();
  }
});

for (const path of outbox.paths) queue.markAnswered(tokenOf(path));
outbox.send();
refill();
