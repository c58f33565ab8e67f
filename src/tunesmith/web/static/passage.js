// Elements for prompts and answers. The server sanitizes `html`; everything else is set as text.
import { html } from "./draw.js";

export const LETTERS = "ABCDEFGHIJKLMNOP";
const ROLES = { user: "User", assistant: "Assistant", system: "System" };

/** An element with a passage, rendered or raw. */
function passage(content, isRaw) {
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

/** Elements of the prompt: one for plain text, one per message of a conversation. */
export function promptElements(prompt, isRaw) {
  return prompt.map((content) => {
    const role = content.role ? html("div", { class: "role" }, ROLES[content.role] ?? content.role) : null;
    return html("div", { class: "message" }, role, passage(content, isRaw));
  });
}

/** An answer with its letter; scrollable by keyboard. */
export function answer(content, index, isRaw) {
  const body = passage(content, isRaw);
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", `Text of answer ${LETTERS[index]}`);
  const title = html("h2", { id: `answer-${index}` }, `Answer ${LETTERS[index]}`);
  return html("article", { class: "answer", "aria-labelledby": title.id }, html("header", {}, title), body);
}
