// The page of a rater's own votes: pages through what they said, and changes or withdraws it through the outbox.
import { answer, passage, VERDICT_TEXTS } from "./answers.js";
import { call, logIn, LoggedOut } from "./api.js";
import { $, announce, controlOfKey, html, isComposing } from "./dom.js";
import { Outbox } from "./outbox.js";
import { draftOf, keepDraft } from "./storage.js";

const PER_PAGE = 10;
const VERDICTS = ["left_much", "left", "tie", "right", "right_much", "both_bad", "skip"];
const NAMES = { ...VERDICT_TEXTS, tie: "Tie", both_bad: "Both bad", skip: "Skip" };
const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

let said = []; // what is shown, as the server or the rater said it last
let isRaw = false;
const pages = [""]; // for each page so far the token before which it begins

const outbox = new Outbox({
  sent(request) {
    announce(request.label.startsWith("Withdrawn") ? request.label : `Recorded: ${request.label}.`);
  },
  refused(request, error) {
    if (request.body?.text) keepDraft(request.path.split("/")[1], { written: request.body.text });
    show().then(() => announce(`Not changed: ${error.message}`, true));
  },
  waiting(count) {
    $("unsent").hidden = count === 0;
    $("unsent").textContent = count ? "The server cannot be reached. What you changed is kept here, also if this tab is closed, and sent as soon as it answers." : "";
  },
  loggedOut: logIn,
});

/** Ask for the page of votes, and show it. */
async function show() {
  try {
    const query = new URLSearchParams({ count: PER_PAGE, before: pages.at(-1) });
    said = await call("GET", `votes?${query}`);
  } catch (error) {
    if (error instanceof LoggedOut) return logIn();
    return announce(`The votes cannot be shown: ${error.message}`, true);
  }
  paint();
}

function paint() {
  $("votes").replaceChildren(...said.map(judgement));
  $("votes").setAttribute("aria-busy", "false");
  $("none").hidden = said.length > 0 || pages.length > 1;
  $("newer").hidden = pages.length === 1;
  $("older").hidden = said.length < PER_PAGE;
}

function change(one, what, body, label) {
  announce(`Saved here, waiting for the server: ${label}.`);
  outbox.add("PUT", `presentations/${one.presentation.token}/${what}`, body, label);
}

/** A card with a prompt, its answers, and what the rater said of them. */
function judgement(one, place) {
  const { presentation } = one;
  const number = (pages.length - 1) * PER_PAGE + place + 1;
  const title = html("h2", { id: `vote-${place}` }, `${number} · ${WHEN.format(new Date(one.answered_at * 1000))}`);
  const answers = presentation.answers.map((text, index) => answer(text, index, isRaw, `${place}-${index}`));
  const withdraw = html("button", { type: "button" }, "Withdraw");
  withdraw.addEventListener("click", () => {
    outbox.add("DELETE", `presentations/${presentation.token}/vote`, undefined, "Withdrawn: it comes back on the page Vote");
    said = said.filter((other) => other !== one);
    paint();
    $("older").focus();
  });
  const prompt = html("div", { class: "messages", tabindex: 0, role: "group", "aria-label": "Prompt" }, ...presentation.prompt.map((text) => passage(text, isRaw)));
  return html(
    "section",
    { class: "card vote", "aria-labelledby": title.id },
    html("header", {}, title, withdraw),
    prompt,
    html("div", { class: "answers", "data-count": answers.length }, ...answers),
    one.ranks.length ? ranks(one) : verdicts(one),
    reason(one),
    writtenAnswer(one),
  );
}

function verdicts(one) {
  const buttons = VERDICTS.filter((verdict) => one.presentation.kind === "pair" || verdict === "skip").map((verdict) => {
    const button = html("button", { type: "button", "data-verdict": verdict, "aria-pressed": String(one.verdict === verdict) }, NAMES[verdict]);
    button.addEventListener("click", () => {
      one.verdict = verdict;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      change(one, "vote", { verdict, reason: one.reason }, VERDICT_TEXTS[verdict]);
    });
    return button;
  });
  return html("div", { class: "others", role: "group", "aria-label": "Your vote" }, ...buttons);
}

/** The rank of each answer, 1 the best; equal ones are ties. */
function ranks(one) {
  const fields = one.ranks.map((rank, index) => {
    const options = one.ranks.map((_, place) => html("option", { value: place + 1, selected: place + 1 === rank }, `${place + 1}`));
    const field = html("select", {}, ...options);
    field.addEventListener("change", () => {
      one.ranks = one.ranks.with(index, Number(field.value));
      change(one, "ranking", { ranks: one.ranks, reason: one.reason }, "the ranking");
    });
    return html("label", {}, `Rank of ${"ABCDEFGHIJKLMNOP"[index]} `, field);
  });
  return html("div", { class: "row", role: "group", "aria-label": "Your ranking, 1 is the best" }, ...fields);
}

function reason(one) {
  const field = html("input", { maxlength: 2000, autocomplete: "off", placeholder: "optional", dir: "auto" });
  field.value = one.reason;
  field.addEventListener("keydown", (event) => event.key === "Enter" && !isComposing(event) && field.blur());
  field.addEventListener("change", () => {
    one.reason = field.value.trim();
    if (one.ranks.length) change(one, "ranking", { ranks: one.ranks, reason: one.reason }, "the reason");
    else change(one, "vote", { verdict: one.verdict, reason: one.reason }, "the reason");
  });
  return html("label", { class: "reason" }, "Reason ", field);
}

function writtenAnswer(one) {
  const { token } = one.presentation;
  const draft = draftOf(token).written;
  const field = html("textarea", { rows: 4, maxlength: 200000, "aria-label": "A better answer", dir: "auto" });
  const save = html("button", { type: "button" }, "Send");
  field.value = draft ?? one.written;
  field.addEventListener("input", () => keepDraft(token, { written: field.value }));
  save.addEventListener("click", () => {
    const text = field.value;
    if (!text.trim()) return field.focus();
    keepDraft(token, { written: "" });
    one.written = text;
    change(one, "demonstration", { text }, "your answer");
  });
  const words = draft ? "A better answer, not sent yet" : one.written ? "Your better answer" : "Write a better answer";
  return html("details", { open: Boolean(draft) }, html("summary", {}, words), field, html("div", { class: "others" }, save));
}

$("older").addEventListener("click", () => {
  pages.push(said.at(-1).presentation.token);
  show().then(() => window.scrollTo(0, 0));
});
$("newer").addEventListener("click", () => {
  pages.pop();
  show().then(() => window.scrollTo(0, 0));
});
document.addEventListener("click", ({ target }) => {
  if (target.closest("button")?.dataset.act !== "raw") return;
  isRaw = !isRaw;
  paint();
});
document.addEventListener("keydown", (event) => {
  if (!event.target.matches("input, textarea, select")) controlOfKey(event)?.click();
});

/** What the server understands of this rater's votes, if it answers. */
async function showMine() {
  const { words } = await call("GET", "raters/me");
  $("mine-words").replaceChildren(...words.map((text) => html("p", {}, text)));
  $("mine").hidden = false;
}

await outbox.adopt();
outbox.send();
show();
showMine().catch(() => {}); // the votes themselves say what is wrong
