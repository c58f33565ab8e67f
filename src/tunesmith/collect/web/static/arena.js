// The arena: a conversation with two models side by side, streamed, and votes on its turns. What the person does goes
// through the outbox, so it is sent once, also over a reload or a restart of the server.
import { answer, passage, VERDICT_TEXTS } from "./answers.js";
import { api, call, logIn, LoggedOut } from "./api.js";
import { $, announce, controlOfKey, html, isComposing, oncePerFrame } from "./dom.js";
import { Outbox } from "./outbox.js";
import { draftOf, keepDraft } from "./storage.js";

// A key pressed twice must not vote on answers that have just appeared.
const SETTLE_MS = 250;
const MIN_RETRY_MS = 1_000;
const MAX_RETRY_MS = 8_000;

const main = $("content");
let conversation = null; // as the server sent it last
let spoken = []; // the two answers while they are drawn
let source = null; // the stream of answers
let isBusy = false; // until the answers to the last message are whole, or an error ended them
let isRaw = false;
let shownAt = 0;
let retryMs = MIN_RETRY_MS;

const outbox = new Outbox({
  sent(request, reply) {
    if (!reply || reply.id !== shownId()) return;
    receive(reply);
    if (request.method === "DELETE") announce("Stopped: your message is back in its field.");
    else if (/turns$|first$/.test(request.path)) listen();
    else announce(request.body.verdict === "skip" ? "Not counted." : `Recorded: ${request.label}.`);
  },
  refused(request, error) {
    if (request.body?.text) write(request.body.text);
    if (request.body?.reason) $("reason").value = request.body.reason;
    // What was to be stopped is answered.
    open().then(() => request.method === "DELETE" || announce(`Not counted: ${error.message}`, true));
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
  else if (last?.obstacle) announce(`${sentence(last.obstacle)} Go on.`);
}

const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}.`;

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
    announce(last.can_vote ? "Which answer is better?" : `${sentence(last.obstacle)} Go on.`);
    $("message").blur();
    document.querySelector(".turn:last-of-type h2")?.focus({ preventScroll: true });
  });
  mine.addEventListener("failed", ({ data }) => {
    if (source !== mine) return;
    stop();
    paint();
    announce(`No answer: ${JSON.parse(data).detail}.`, true);
    $("remedies").hidden = false;
    $("shorten").hidden = conversation.turns.length - 1 <= conversation.first;
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
  $("remedies").hidden = true;
  $("send").disabled = isBusy;
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  main.dataset.state = isBusy ? "busy" : mayVote ? "voting" : "ready";
  shownAt = performance.now();
  window.scrollTo(0, document.body.scrollHeight);
}

function turnElement(turn, place) {
  const isLeftOut = place < conversation.first;
  const words = `Turn ${place + 1}${isLeftOut ? ", which the models do not read any more" : ""}`;
  const title = html("h2", { tabindex: -1, id: `turn-${place}` }, words);
  const answers = turn.answers.length ? turn.answers : ["", ""].map((text) => ({ text, html: null }));
  const shown = answers.map((one, side) => {
    const article = answer(one, side, isRaw, `${place}-${side}`);
    if (turn.answers.length) article.querySelector("header").append(copyButton(one.text, side));
    if (turn.names.length) article.querySelector("header").append(html("span", { class: "name" }, turn.names[side]));
    const goesOn = turn.verdict || place < conversation.turns.length - 1;
    article.classList.toggle("kept", Boolean(goesOn && turn.answers.length && turn.kept === side));
    if (!turn.answers.length) article.querySelector(".passage").className = "passage raw";
    if (!turn.answers.length) article.querySelector(".passage").replaceChildren(isBusy ? spoken[side] || "…" : "");
    return article;
  });
  return html(
    "section",
    { class: isLeftOut ? "turn left-out" : "turn", "aria-labelledby": title.id },
    html("div", { class: "card" }, title, passage({ text: turn.text, html: null }, true)),
    html("div", { class: "answers", "data-count": 2 }, ...shown),
  );
}

function copyButton(text, side) {
  const button = html("button", { type: "button", class: "source", "aria-label": `Copy answer ${"AB"[side]}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied.");
    } catch {
      copyBySelection(text);
    }
  });
  return button;
}

/** Without encryption browsers have no clipboard for pages. */
function copyBySelection(text) {
  const field = html("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  announce(document.execCommand("copy") ? "Copied." : "This browser does not copy; press Show source and select the text.");
  field.remove();
}

/** Put `text` into the field of the message, unless something else is typed there. */
function write(text) {
  if (!$("message").value.trim()) $("message").value = text;
  keepDraft("arena", { message: $("message").value });
}

/** Take the last message back, which ends the drawing of its answers. */
function takeBack() {
  const number = conversation.turns.length - 1;
  const { text } = conversation.turns[number];
  stop();
  paint();
  write(text);
  outbox.add("DELETE", `arena/${conversation.id}/turns/${number}`);
  $("message").focus();
}

/** Have the models read the later half of what they read so far. */
function shorten() {
  const { first, turns, id } = conversation;
  const number = Math.max(first + 1, Math.ceil((first + turns.length - 1) / 2));
  outbox.add("PUT", `arena/${id}/first`, { number });
}

async function send() {
  const text = $("message").value;
  if (!text.trim() || isBusy || outbox.size) return;
  isBusy = true;
  $("send").disabled = true;
  try {
    if (!conversation) await begin();
    $("message").value = "";
    keepDraft("arena", { message: "" });
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
  announce(`Saved here, waiting for the server: ${VERDICT_TEXTS[verdict]}.`);
  outbox.add("PUT", `arena/${conversation.id}/turns/${conversation.turns.length - 1}/vote`, body, VERDICT_TEXTS[verdict]);
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
for (const id of ["fresh", "begin"]) $(id).addEventListener("click", fresh);
for (const id of ["stop", "change"]) $(id).addEventListener("click", takeBack);
$("retry").addEventListener("click", listen);
$("shorten").addEventListener("click", shorten);
$("message").addEventListener("input", () => keepDraft("arena", { message: $("message").value }));
$("message").value = draftOf("arena").message ?? "";
$("undo").addEventListener("click", () => {
  if (outbox.size) return;
  outbox.add("PUT", `arena/${conversation.id}/turns/${conversation.turns.length - 1}/vote`, { verdict: "skip" });
});
document.addEventListener("click", ({ target }) => {
  const { verdict, act } = target.closest("button")?.dataset ?? {};
  if (verdict) vote(verdict);
  if (act !== "raw") return;
  isRaw = !isRaw;
  paint();
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
