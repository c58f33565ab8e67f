// Answers side by side, and what the verdicts on them are called: for the vote page and the arena.
import { html } from "./dom.js";

export const LETTERS = "ABCDEFGHIJKLMNOP";

export const VERDICT_TEXTS = {
  left_much: "A is much better",
  left: "A is better",
  tie: "a tie",
  right: "B is better",
  right_much: "B is much better",
  both_bad: "both are bad",
  skip: "skipped",
  ranked: "the ranking",
};

/** An element with a passage, rendered or raw. */
export function passage(content, isRaw) {
  const isEmpty = content.text === "";
  const isText = isEmpty || isRaw || content.html === null;
  const element = html(
    "div",
    { class: `passage ${isEmpty ? "empty" : isText ? "raw" : ""}`.trim(), dir: "auto" },
    isText ? content.text || "(an empty answer)" : null,
  );
  if (!isText) element.innerHTML = content.html;
  return element;
}

/** An answer with its letter; scrollable by keyboard. */
export function answer(content, index, isRaw, id = index) {
  const body = passage(content, isRaw);
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", `Text of answer ${LETTERS[index]}`);
  const title = html("h2", { id: `answer-${id}` }, `Answer ${LETTERS[index]}`);
  return html("article", { class: "answer", "aria-labelledby": title.id }, html("header", {}, title), body);
}
