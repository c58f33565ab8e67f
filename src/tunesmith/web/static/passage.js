// Puts texts on the page. The server has made `html` safe; anything else is set as text.

/** An element that shows a passage formatted, or as it is. */
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

/** The prompt: one text, or the turns of a conversation. */
export function turns(prompt, isRaw) {
  return prompt.map((content) => {
    const turn = document.createElement("div");
    turn.className = "turn";
    if (content.role) {
      const who = document.createElement("div");
      who.className = "who";
      who.textContent = ROLES[content.role] ?? content.role;
      turn.append(who);
    }
    turn.append(passage(content, isRaw));
    return turn;
  });
}

export const LETTERS = "ABCDEFGHIJKLMNOP";

/** An answer with its letter, scrollable by keyboard. */
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
