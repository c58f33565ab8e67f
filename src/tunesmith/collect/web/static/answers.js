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

// Characters that cannot be seen, or that change the order of others; joiners of emoji and scripts, and line ends, are none.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** An element with a passage, rendered or as it was typed. */
export function passage(content, isRaw) {
  const isEmpty = content.text === "";
  const isText = isEmpty || isRaw || content.html === null;
  const element = html(
    "div",
    { class: `passage ${isEmpty ? "empty" : isText ? "raw" : ""}`.trim(), dir: "auto" },
    isText ? content.text || "(an empty answer)" : null,
  );
  if (!isText) element.innerHTML = content.html;
  if (content.text.search(UNSEEN) >= 0) nameUnseen(element);
  return element;
}

/** Put each character that cannot be seen into an element that names it. */
function nameUnseen(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = [];
    let end = 0;
    for (const { 0: found, index } of text.data.matchAll(UNSEEN)) {
      const name = `U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      parts.push(text.data.slice(end, index), html("span", { class: "unseen", "data-name": name }, found));
      end = index + found.length;
    }
    if (end) text.replaceWith(...parts, text.data.slice(end));
  }
}

/** A button that shows what was typed, or what it looks like; null for passages that look as they were typed. */
export function sourceButton(contents, isRaw) {
  if (contents.every((one) => one.html === null)) return null;
  const words = isRaw ? " Show formatted" : " Show source";
  const states = { "aria-keyshortcuts": "m", "aria-pressed": String(isRaw), title: "Shown formatted; the source is what was written" };
  return html("button", { type: "button", class: "source", "data-act": "raw", ...states }, html("kbd", {}, "M"), words);
}

/** An answer with its letter; scrollable by keyboard. */
export function answer(content, index, isRaw, id = index) {
  const body = passage(content, isRaw);
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", `Text of answer ${LETTERS[index]}`);
  const title = html("h2", { id: `answer-${id}` }, `Answer ${LETTERS[index]}`);
  const header = html("header", {}, title, sourceButton([content], isRaw));
  return html("article", { class: "answer", "aria-labelledby": title.id }, header, body);
}
