// Elements for prompts and answers. The server sanitizes `html`; everything else is set as text.

/** An element with a passage, rendered or raw. */
export function passage(content, isRaw) {
  const element = document.createElement("div");
  element.className = "passage";
  element.dir = "auto";
  if (content.text === "") {
    element.textContent = "(an empty answer)";
    element.classList.add("empty");
  } else if (isRaw || content.html === null) {
    element.textContent = content.text;
    element.classList.add("raw");
  } else {
    element.innerHTML = content.html;
  }
  return element;
}

const ROLES = { user: "User", assistant: "Assistant", system: "System" };

/** Elements of the prompt: one for plain text, one per message of a conversation. */
export function promptElements(prompt, isRaw) {
  return prompt.map((content) => {
    const message = document.createElement("div");
    message.className = "message";
    if (content.role) {
      const role = document.createElement("div");
      role.className = "role";
      role.textContent = ROLES[content.role] ?? content.role;
      message.append(role);
    }
    message.append(passage(content, isRaw));
    return message;
  });
}

export const LETTERS = "ABCDEFGHIJKLMNOP";

/** An answer with its letter; scrollable by keyboard. */
export function answer(content, index, isRaw) {
  const article = document.createElement("article");
  article.className = "answer";
  article.setAttribute("aria-labelledby", `answer-${index}`);
  const header = document.createElement("header");
  const title = document.createElement("h2");
  title.id = `answer-${index}`;
  title.textContent = `Answer ${LETTERS[index]}`;
  header.append(title);
  const body = passage(content, isRaw);
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", `Text of answer ${LETTERS[index]}`);
  article.append(header, body);
  return article;
}
