// The vote page: shows what the desk holds, turns keys and buttons into votes, and hands those to the outbox.
import { say, sayUnsent, showProgress } from "./announce.js";
import { LoggedOut, Refused } from "./api.js";
import { Desk } from "./desk.js";
import { Outbox } from "./outbox.js";
import { answer, LETTERS, turns } from "./passage.js";
import { Ranking } from "./ranking.js";

const POLL_MS = 2_000;
const LAST_POLL_MS = 10_000;
// A key that was pressed twice must not judge the pair that has just come up.
const SETTLE_MS = 250;

const VERDICT_OF_KEY = { 1: "left_much", 2: "left", 3: "tie", 4: "right", 5: "right_much", 0: "both_bad", s: "skip" };
const ACT_OF_KEY = { u: "undo", w: "write", m: "raw", "?": "help", g: "guidelines", r: "reason" };
const RANKING_ACT_OF_KEY = { "=": "level", Enter: "send", Backspace: "back" };
const WORDS = {
  left_much: "A is much better",
  left: "A is better",
  tie: "a tie",
  right: "B is better",
  right_much: "B is much better",
  both_bad: "both are bad",
  skip: "skipped",
  ranked: "the ranking",
};

const $ = (id) => document.getElementById(id);
const main = $("content");
const desk = new Desk();
const history = [];
const seen = { token: null, since: 0, ms: 0 };
let ranking = null;
let isRaw = false;
let pollMs = POLL_MS;
let pollTimer = 0;
let isFilling = false;

const outbox = new Outbox({
  sent(letter) {
    desk.settle(tokenOf(letter.path));
    if (letter.path.endsWith("/demonstration")) say("Your answer is stored.");
    refill();
  },
  refused(letter, error) {
    const token = tokenOf(letter.path);
    // An undo whose answer got lost is refused the second time, because it is done.
    if (letter.method === "DELETE" && letter.tries > 1) return;
    say(`Not counted: ${error.message}`, true);
    if (!letter.path.endsWith("/demonstration")) {
      const wasShown = desk.current?.token === token;
      desk.drop(token);
      if (wasShown) show();
    }
    refill();
  },
  waiting: sayUnsent,
  loggedOut: () => location.assign("/login"),
});

function tokenOf(path) {
  return path.split("/")[1];
}

/** Fetch ahead, and show what came if nothing was shown. */
async function refill() {
  if (isFilling) return;
  isFilling = true;
  clearTimeout(pollTimer);
  try {
    showProgress(await desk.fill());
    if (desk.current?.token !== seen.token) show();
    if (!desk.current) $("nothing").hidden = false;
  } catch (error) {
    if (error instanceof LoggedOut) location.assign("/login");
    if (error instanceof Refused) say(error.message, true);
  } finally {
    isFilling = false;
  }
  if (desk.current) {
    pollMs = POLL_MS;
  } else {
    pollTimer = setTimeout(() => (document.hidden ? 0 : refill()), pollMs);
    pollMs = Math.min(pollMs * 1.5, LAST_POLL_MS);
  }
}

function show() {
  const shown = desk.current;
  $("table").hidden = !shown;
  $("nothing").hidden = Boolean(shown);
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
    if (desk.current === shown) main.dataset.state = "ready";
  }, SETTLE_MS);
}

/** Draw what is shown, in the chosen form. */
function paint() {
  const shown = desk.current;
  const passages = [...shown.prompt, ...shown.answers];
  document.querySelector('[data-act="raw"]').hidden = passages.every((one) => one.html === null);
  $("prompt").replaceChildren(...turns(shown.prompt, isRaw));
  $("prompt").tabIndex = $("prompt").scrollHeight > $("prompt").clientHeight ? 0 : -1;
  const answers = $("answers");
  answers.dataset.count = shown.answers.length;
  answers.replaceChildren(...shown.answers.map((one, index) => answer(one, index, isRaw)));
  answers.classList.remove("fresh");
  void answers.offsetWidth; // Lets the animation begin anew.
  answers.classList.add("fresh");
  $("pair-keys").hidden = ranking !== null;
  $("ranking-keys").hidden = ranking === null;
  document.querySelector('[data-verdict="both_bad"]').hidden = ranking !== null;
  if (ranking) addPlaces();
}

function addPlaces() {
  document.querySelectorAll(".answer").forEach((article, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "place";
    button.dataset.place = index;
    button.setAttribute("aria-keyshortcuts", String(index + 1));
    article.querySelector("header").append(button);
  });
  paintPlaces();
}

function paintPlaces() {
  ranking.ranks.forEach((rank, index) => {
    const button = document.querySelector(`[data-place="${index}"]`);
    const key = document.createElement("kbd");
    key.textContent = String(index + 1);
    button.replaceChildren(key, rank === null ? " Place" : ` Place ${rank}`);
    button.setAttribute("aria-label", `Answer ${LETTERS[index]}: ${rank === null ? "no place yet" : `place ${rank}`}`);
    button.closest(".answer").classList.toggle("placed", rank !== null);
  });
  document.querySelector('[data-act="level"]').setAttribute("aria-pressed", String(ranking.isLevel));
}

function dwell() {
  return Math.round(Math.min(seen.ms + (document.hidden ? 0 : performance.now() - seen.since), 86_400_000));
}

/** Send a verdict or a ranking on what is shown, and show the next one at once. */
function send(what, body) {
  const presentation = desk.answer();
  history.push(presentation);
  if (history.length > 50) history.shift();
  outbox.add("PUT", `presentations/${presentation.token}/${what}`, body);
  say(`Recorded: ${WORDS[body.verdict ?? "ranked"]}.`);
  show();
  if (!desk.current) refill();
}

function vote(verdict) {
  if (main.dataset.state !== "ready" || !desk.current) return;
  if (ranking && verdict !== "skip") return;
  send("vote", { verdict, reason: $("reason").value.trim(), dwell_ms: dwell() });
}

const acts = {
  send() {
    if (main.dataset.state !== "ready" || !ranking) return;
    ranking.finish();
    paintPlaces();
    if (!ranking.isWhole) return say("Give every answer a place first.", true);
    send("ranking", { ranks: ranking.ranks, dwell_ms: dwell() });
  },
  level() {
    ranking?.toggleLevel();
    paintPlaces();
  },
  back() {
    ranking?.back();
    paintPlaces();
  },
  undo() {
    const presentation = history.pop();
    if (!presentation) return say("There is nothing to undo.");
    outbox.add("DELETE", `presentations/${presentation.token}/vote`);
    desk.takeBack(presentation);
    show();
    say("Undone: vote again.");
  },
  write() {
    if (!desk.current) return;
    $("writing").dataset.token = desk.current.token;
    $("written").value = "";
    $("writing").showModal();
    $("written").focus();
  },
  "send-written"() {
    const text = $("written").value;
    if (!text.trim()) return $("written").focus();
    outbox.add("PUT", `presentations/${$("writing").dataset.token}/demonstration`, { text });
    $("writing").close();
    say("Your answer is on its way.");
  },
  raw() {
    isRaw = !isRaw;
    document.querySelector('[data-act="raw"]').setAttribute("aria-pressed", String(isRaw));
    if (desk.current) paint();
  },
  help() {
    $("help").showModal();
  },
  guidelines() {
    const guidelines = $("guidelines");
    if (guidelines) guidelines.open = !guidelines.open;
  },
  reason() {
    $("reason").focus();
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { verdict, act, place } = button.dataset;
  if (verdict) vote(verdict);
  if (act) acts[act]();
  if (place !== undefined && ranking) {
    ranking.name(Number(place));
    paintPlaces();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey && event.key === "Enter" && $("writing").open) return acts["send-written"]();
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
  if (event.target === $("reason")) {
    if (event.key === "Enter" || event.key === "Escape") $("reason").blur();
    return;
  }
  const onButton = event.key === "Enter" && event.target.closest("button, a, summary");
  if (onButton) return;
  if (handleKey(event.key.length === 1 ? event.key.toLowerCase() : event.key)) event.preventDefault();
});

/** True if the key means something here. */
function handleKey(key) {
  if (ranking && /^[1-9]$/.test(key)) {
    ranking.name(Number(key) - 1);
    paintPlaces();
  } else if (ranking && RANKING_ACT_OF_KEY[key]) {
    acts[RANKING_ACT_OF_KEY[key]]();
  } else if (VERDICT_OF_KEY[key]) {
    vote(VERDICT_OF_KEY[key]);
  } else if (ACT_OF_KEY[key]) {
    acts[ACT_OF_KEY[key]]();
  } else {
    return false;
  }
  return true;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    seen.ms += performance.now() - seen.since;
  } else {
    seen.since = performance.now();
    refill();
  }
});

for (const path of outbox.paths) desk.markAnswered(tokenOf(path));
outbox.send();
refill();
