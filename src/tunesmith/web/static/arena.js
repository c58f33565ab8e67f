// The arena: a conversation with two models side by side, streamed, and votes on its turns. What the person does goes
// through the outbox, so it is sent once, also over a reload or a restart of the server.
import { answer, passage, VERDICT_TEXTS } from "./answers.js";
import { api, call, logIn, LoggedOut } from "./api.js";
import { $, announce, controlOfKey, html, isComposing, oncePerFrame } from "./dom.js";
import { Outbox } from "./outbox.js";

// A key pressed twice must not vote on answers that have just appeared.
const SETTLE_MS = 250;
const MIN_RETRY_MS = 1_000;
const MAX_RETRY_MS = 8_000;

const main = $("content");
let conversation = null; // as the server sent it last
let spoken = []; // the two answers while they are drawn
let source = null; // the stream of answers
let isBusy = false; // until the answers to the last message are whole, or an error ended them
let shownAt = 0;
let retryMs = MIN_RETRY_MS;

const outbox = new Outbox({
  sent(request, reply) {
    if (!reply || reply.id !== shownId()) return;
    receive(reply);
    if (request.path.endsWith("/turns")) listen();
    else announce(request.body.verdict === "skip" ? "Not counted." : `Recorded: ${VERDICT_TEXTS[request.body.verdict]}.`);
  },
  refused(request, error) {
    if (request.body.text) $("message").value = request.body.text;
    open().then(() => announce(`Not counted: ${error.message}`, true));
  },
  waiting(count) {
    $("unsent").hidden = count === 0;
    $("unsent").textContent = count ? "The server cannot be reached. What you did is kept here, also if this tab is closed, and sent as soon as it answers." : "";
  },
  loggedOut: logIn,
});

const shownId = () => location.hash.slice(1);

/** Show the conversation that the address names; its answers come if they are missing. */
async function open() {
  stop();
  conversation = null;
  if (shownId()) {
    try {
      conversation = await call("GET", `arena/${encodeURIComponent(shownId())}`);
    } catch (error) {
      if (error instanceof LoggedOut) return logIn();
      announce(`The conversation cannot be shown: ${error.message}`, true);
      if (!error.status) return setTimeout(open, wait()); // the server is away
    }
  }
  retryMs = MIN_RETRY_MS;
  paint();
  const last = conversation?.turns.at(-1);
  if (last && !last.answers.length) listen();
}

function wait() {
  retryMs = Math.min(2 * retryMs, MAX_RETRY_MS);
  return retryMs;
}

function receive(reply) {
  conversation = reply;
  paint();
}

function stop() {
  source?.close();
  source = null;
  isBusy = false;
}

/** Follow the answers to the last message. The browser reconnects by itself, and the server goes on. */
function listen() {
  stop();
  isBusy = true;
  spoken = ["", ""];
  paint();
  announce("Both are answering.");
  const mine = new EventSource(api(`arena/${conversation.id}/stream`));
  source = mine;
  mine.onopen = () => {
    spoken = ["", ""]; // the stream tells everything again
  };
  mine.addEventListener("text", ({ data }) => {
    const { side, text } = JSON.parse(data);
    spoken[side] += text;
    paintSpoken();
  });
  mine.addEventListener("done", ({ data }) => {
    if (source !== mine) return;
    stop();
    receive(JSON.parse(data));
    const last = conversation.turns.at(-1);
    announce(last.can_vote ? "Which answer is better?" : "The two answers are the same: there is nothing to compare. Go on.");
    $("message").blur();
    document.querySelector(".turn:last-of-type h2")?.focus({ preventScroll: true });
  });
  mine.addEventListener("failed", ({ data }) => {
    if (source !== mine) return;
    stop();
    paint();
    announce(`No answer: ${JSON.parse(data).detail}.`, true);
    $("retry").hidden = false;
  });
  mine.onerror = () => {
    if (source !== mine) return;
    announce("The connection broke; the answers go on when the server is back.", true);
    if (mine.readyState === EventSource.CLOSED) {
      stop();
      setTimeout(open, wait());
    }
  };
}

const paintSpoken = oncePerFrame(() => {
  document.querySelectorAll(".turn:last-of-type .answer .passage").forEach((element, side) => {
    if (isBusy) element.replaceChildren(spoken[side]);
  });
});

function paint() {
  const turns = conversation?.turns ?? [];
  $("turns").replaceChildren(...turns.map(turnElement));
  const last = turns.at(-1);
  const mayVote = Boolean(last?.can_vote) && !isBusy;
  $("vote").hidden = !mayVote;
  $("why").hidden = !mayVote;
  for (const verdict of ["both_bad", "skip"]) document.querySelector(`[data-verdict="${verdict}"]`).hidden = !mayVote;
  $("undo").hidden = !last?.names.length || last.verdict === "skip";
  $("retry").hidden = true;
  $("send").disabled = isBusy;
  main.dataset.state = isBusy ? "busy" : mayVote ? "voting" : "ready";
  shownAt = performance.now();
  window.scrollTo(0, document.body.scrollHeight);
}

function turnElement(turn, place) {
  const title = html("h2", { tabindex: -1, id: `turn-${place}` }, `Turn ${place + 1}`);
  const answers = turn.answers.length ? turn.answers : ["", ""].map((text) => ({ text, html: null }));
  const shown = answers.map((one, side) => {
    const article = answer(one, side, false, `${place}-${side}`);
    if (turn.names.length) article.querySelector("header").append(html("span", { class: "name" }, turn.names[side]));
    const goesOn = turn.verdict || place < conversation.turns.length - 1;
    article.classList.toggle("kept", Boolean(goesOn && turn.answers.length && turn.kept === side));
    if (!turn.answers.length) article.querySelector(".passage").className = "passage raw";
    if (!turn.answers.length) article.querySelector(".passage").replaceChildren(isBusy ? spoken[side] || "…" : "");
    return article;
  });
  return html(
    "section",
    { class: "turn", "aria-labelledby": title.id },
    html("div", { class: "card" }, title, passage({ text: turn.text, html: null }, true)),
    html("div", { class: "answers", "data-count": 2 }, ...shown),
  );
}

async function send() {
  const text = $("message").value;
  if (!text.trim() || isBusy || outbox.size) return;
  isBusy = true;
  $("send").disabled = true;
  try {
    if (!conversation) await begin();
    $("message").value = "";
    outbox.add("POST", `arena/${conversation.id}/turns`, { number: conversation.turns.length, text });
  } catch (error) {
    if (error instanceof LoggedOut) return logIn();
    stop();
    announce(error.message, true);
  }
  $("send").disabled = isBusy;
}

async function begin() {
  const names = [...document.querySelectorAll("#models input:checked")].map((box) => box.value);
  conversation = await call("POST", "arena", { names });
  history.replaceState(null, "", `#${conversation.id}`);
}

function vote(verdict) {
  if (main.dataset.state !== "voting" || performance.now() - shownAt < SETTLE_MS || outbox.size) return;
  const body = { verdict, reason: $("reason").value.trim(), dwell_ms: Math.round(Math.min(performance.now() - shownAt, 86_400_000)) };
  $("reason").value = "";
  outbox.add("PUT", `arena/${conversation.id}/turns/${conversation.turns.length - 1}/vote`, body);
}

function fresh() {
  stop();
  history.replaceState(null, "", location.pathname);
  conversation = null;
  paint();
  announce("A new conversation, with other models.");
  $("message").focus();
}

$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("fresh").addEventListener("click", fresh);
$("retry").addEventListener("click", listen);
$("undo").addEventListener("click", () => {
  if (outbox.size) return;
  outbox.add("PUT", `arena/${conversation.id}/turns/${conversation.turns.length - 1}/vote`, { verdict: "skip" });
});
document.addEventListener("click", ({ target }) => {
  const verdict = target.closest("button")?.dataset.verdict;
  if (verdict) vote(verdict);
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("textarea, input:not([type=checkbox])")) {
    if (isComposing(event)) return;
    if (event.target === $("message") && event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!event.repeat) send();
    } else if (event.key === "Escape" || (event.key === "Enter" && event.target === $("reason"))) {
      event.target.blur();
    }
    return;
  }
  const control = controlOfKey(event);
  if (!control) return;
  event.preventDefault();
  if (control.matches("textarea, input")) control.focus();
  else control.click();
});
window.addEventListener("hashchange", open);

/** The models that an admin may choose from; they are asked for when that part is opened, since votes are blind. */
async function showModels() {
  if ($("models").childElementCount) return;
  const names = await call("GET", "arena/models").catch(() => []);
  $("models").replaceChildren(
    ...names.map((name) => html("label", { class: "choose" }, html("input", { type: "checkbox", value: name }), ` ${name}`)),
  );
}

$("choice")?.addEventListener("toggle", showModels);
$("models")?.addEventListener("change", () => conversation && fresh());
open();
await outbox.adopt();
outbox.send();
