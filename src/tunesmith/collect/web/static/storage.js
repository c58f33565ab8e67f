// What this browser keeps for the rater who is logged in: requests that are not sent yet, drafts, what was read.
const PREFIX = `tunesmith.${document.body.dataset.who ?? ""}.`;

/** The kept value; null if there is none. */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** Keep a value, or forget it with null. False if the browser keeps nothing. */
export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false; // storage is full or disabled
  }
}

/** Names of the kept values that begin so. */
export function names(beginning) {
  try {
    const found = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + beginning));
    return found.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** What the rater has typed about a presentation, or in a conversation, and not sent: `reason`, `written`, `message`. */
export const draftOf = (token) => load(`draft.${token}`) ?? {};

/** Keep parts of a draft; empty ones are forgotten. */
export function keepDraft(token, parts) {
  const draft = { ...draftOf(token), ...parts };
  save(`draft.${token}`, Object.values(draft).some(Boolean) ? draft : null);
}
