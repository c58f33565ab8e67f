// The vote page: shows queued presentations and sends votes, made by keys or buttons, through the outbox.
import { answer, LETTERS, passage, sourceButton, VERDICT_TEXTS } from "./answers.js";
import { call, logIn, LoggedOut, Refused } from "./api.js";
import { $, announce, controlOfKey, html, isComposing } from "./dom.js";
import { Outbox } from "./outbox.js";
import { PresentationQueue } from "./presentations.js";
import { Ranking } from "./ranking.js";
import { draftOf, keepDraft, load, save } from "./storage.js";

const POLL_MS = 2_000;
const MAX_POLL_MS = 10_000;
// A key pressed twice must not vote on the next pair, which has just appeared.
const SETTLE_MS = 250;
// Guidelines that were in sight for so long count as read.
const READ_MS = 3_000;

const ROLES = { user: "User", assistant: "Assistant", system: "System" };

const main = $("content");
const queue = new PresentationQueue();
const history = []; // what was answered here: the presentation and the body of its request
const seen = { token: null, since: 0, ms: 0 };
let ranking = null;
let isRaw = false;
let pollMs = POLL_MS;
let pollTimer = 0;
let isFilling = false;
let mustRefill = false;
let isUndoing = false;
let warned = null; // the presentation whose unsent answer was told

const outbox = new Outbox({
  sent(request) {
    const token = tokenOf(request.path);
    if (request.path.endsWith("/demonstration")) {
      announce("Your answer is stored.");
    } else if (request.method === "PUT") {
      queue.settle(token);
      if (!outbox.paths.some((path) => tokenOf(path) === token)) announce(`Recorded: ${request.label}.`);
    }
    refill();
  },
  refused(request, error) {
    const token = tokenOf(request.path);
    announce(`Not counted: ${error.message}`, true);
    if (request.path.endsWith("/demonstration")) {
      keepDraft(token, { written: request.body.text });
    } else {
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
    ? `The server cannot be reached. ${count === 1 ? "One action is" : `${count} actions are`} kept here, also if this tab is closed, and sent as soon as it answers.`
    : "";
}

function showProgress(progress) {
  const votes = progress.num_votes === 1 ? "1 vote" : `${progress.num_votes} votes`;
  const limit = progress.max_votes ? ` of ${progress.max_votes}` : "";
  $("progress-text").textContent = `${votes}${limit} · ${progress.num_left} left`;
  $("done").textContent = $("progress-text").textContent;
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
    const progress = await queue.fill();
    showProgress(progress);
    $("undo-last").hidden = !(progress.num_votes || history.length || outbox.size);
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
  const draft = shown ? draftOf(shown.token) : {};
  $("reason").value = draft.reason ?? "";
  $("written").value = draft.written ?? "";
  closeWriting();
  if (!shown) return;
  paint();
  if (draft.written) announce("You have begun a better answer to this one: W opens it.");
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
  reachPrompt();
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
function send(what, judged) {
  if (!mayLeave(queue.current.token)) return;
  const presentation = queue.answer();
  const body = { ...judged, reason: $("reason").value.trim(), dwell_ms: dwell() };
  const label = VERDICT_TEXTS[body.verdict ?? "ranked"];
  keepDraft(presentation.token, { reason: "" });
  history.push({ presentation, reason: body.reason });
  if (history.length > 50) history.shift();
  announce(`Saved here, waiting for the server: ${label}.`);
  outbox.add("PUT", `presentations/${presentation.token}/${what}`, body, label);
  show();
  if (!queue.current) refill();
}

/** False, once, if an answer was written for this presentation and not sent: the next vote leaves it as a draft. */
function mayLeave(token) {
  if (!$("written").value.trim() || warned === token) return true;
  warned = token;
  openWriting();
  $("written").blur();
  announce("Your written answer is not sent: send it, or vote again to leave it as a draft.", true);
  return false;
}

function openWriting() {
  $("writing").hidden = false;
  $("table").classList.add("writing");
  document.querySelector('[data-act="write"]').setAttribute("aria-expanded", "true");
  $("writing").scrollIntoView({ block: "nearest" });
}

function closeWriting() {
  $("writing").hidden = true;
  $("table").classList.remove("writing");
  document.querySelector('[data-act="write"]').setAttribute("aria-expanded", "false");
}

function vote(verdict) {
  if (main.dataset.state !== "ready" || !queue.current) return;
  if (ranking && verdict !== "skip") return;
  send("vote", { verdict });
}

/** What was answered last: here, or before the page was loaded. */
async function lastAnswered() {
  if (history.length || outbox.size) return history.pop();
  const [last] = await call("GET", "votes?count=1").catch(() => []);
  return last;
}

const actions = {
  send() {
    if (main.dataset.state !== "ready" || !ranking) return;
    ranking.finish();
    paintRanks();
    if (!ranking.isComplete) return announce("Give every answer a place first.", true);
    send("ranking", { ranks: ranking.ranks });
  },
  level() {
    ranking?.toggleTie();
    paintRanks();
  },
  back() {
    ranking?.back();
    paintRanks();
  },
  async undo() {
    if (isUndoing) return;
    isUndoing = true;
    const last = await lastAnswered();
    isUndoing = false;
    if (!last) return announce("There is nothing to undo.");
    const { token } = last.presentation;
    outbox.add("DELETE", `presentations/${token}/vote`);
    keepDraft(token, { reason: last.reason });
    queue.takeBack(last.presentation);
    show();
    announce("Undone: vote again.");
  },
  write() {
    if (!queue.current) return;
    openWriting();
    $("written").focus();
  },
  "close-written"() {
    closeWriting();
    if ($("written").value.trim()) announce("Kept as a draft: W opens it again.");
    document.querySelector('[data-act="write"]').focus();
  },
  "send-written"() {
    const text = $("written").value;
    if (!text.trim()) return $("written").focus();
    const { token } = queue.current;
    keepDraft(token, { written: "" });
    $("written").value = "";
    closeWriting();
    document.querySelector('[data-act="write"]').focus();
    announce("Your answer is saved here, waiting for the server.");
    outbox.add("PUT", `presentations/${token}/demonstration`, { text });
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

/** Keys in a field are its text, but for those that leave it or send it. */
function keyInField(event) {
  if (isComposing(event)) return;
  const isWritten = event.target === $("written");
  if (event.key === "Escape") {
    if (isWritten) actions["close-written"]();
    else event.target.blur();
  } else if (event.key === "Enter") {
    if (!isWritten) event.target.blur();
    else if (event.ctrlKey || event.metaKey) actions["send-written"]();
  }
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, textarea")) return keyInField(event);
  if (document.querySelector("dialog[open]")) return;
  const onButton = event.key === "Enter" && event.target.closest("button, a, summary");
  if (onButton) return;
  const control = controlOfKey(event);
  if (!control) return;
  event.preventDefault();
  if (control === $("reason")) control.focus();
  else control.click();
});

for (const id of ["reason", "written"]) {
  $(id).addEventListener("input", () => queue.current && keepDraft(queue.current.token, { [id]: $(id).value }));
}

/** Guidelines are open until they were read once; then they are as the rater left them. On a phone they say that they
 * are new instead, since the answers would be below them. */
function showGuidelines() {
  const details = $("guidelines");
  if (!details) return;
  const text = details.querySelector(".passage").textContent;
  const kept = load("guidelines");
  const isNew = kept?.text !== text;
  const isWide = window.matchMedia("(min-width: 621px)").matches;
  details.open = isNew ? isWide : kept.isOpen;
  $("guidelines-new").hidden = !isNew || isWide;
  const reading = isNew && isWide ? setTimeout(() => save("guidelines", { text, isOpen: false }), READ_MS) : 0;
  details.querySelector("summary").addEventListener("click", () => {
    clearTimeout(reading);
    $("guidelines-new").hidden = true;
    save("guidelines", { text, isOpen: !details.open });
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    seen.ms += performance.now() - seen.since;
  } else {
    seen.since = performance.now();
    refill();
  }
});

showGuidelines();
await outbox.adopt();
for (const path of outbox.paths) queue.markAnswered(tokenOf(path));
outbox.send();
refill();

/** Let keys reach the prompt where it scrolls, which it may at another width of the window. */
function reachPrompt() {
  const { scrollHeight, scrollWidth, clientHeight, clientWidth } = $("prompt");
  $("prompt").tabIndex = scrollHeight > clientHeight || scrollWidth > clientWidth ? 0 : -1;
}

addEventListener("resize", reachPrompt);
