// Requests that must not get lost. They are written down before they are sent, in the order of the rater's actions, and
// are sent again, with the same key, until the server has answered. A reload of the page goes on where it stood.
import { call, LoggedOut, newKey, Refused, Unreachable } from "./api.js";

const STORE = "tunesmith.outbox";
const FIRST_WAIT_MS = 400;
const LAST_WAIT_MS = 8_000;

export class Outbox {
  #letters = read();
  #isSending = false;
  #wake = () => {};

  /** `on` holds what is called: `sent(letter, answer)`, `refused(letter, error)`, `waiting(count)`, `loggedOut()`. */
  constructor(on) {
    this.on = on;
    window.addEventListener("online", () => this.#wake());
  }

  get size() {
    return this.#letters.length;
  }

  /** Paths of what was not sent yet. */
  get paths() {
    return this.#letters.map((letter) => letter.path);
  }

  add(method, path, body) {
    this.#letters.push({ key: newKey(), method, path, body, tries: 0 });
    write(this.#letters);
    this.send();
  }

  /** Send all there is, the oldest first. Harmless while it is sending. */
  async send() {
    if (this.#isSending) return;
    this.#isSending = true;
    try {
      let wait = FIRST_WAIT_MS;
      while (this.#letters.length) {
        const isThrough = await this.#sendFirst();
        if (isThrough) {
          wait = FIRST_WAIT_MS;
        } else {
          this.on.waiting(this.#letters.length);
          await this.#sleep(wait);
          wait = Math.min(wait * 2, LAST_WAIT_MS);
        }
      }
      this.on.waiting(0);
    } catch (error) {
      if (!(error instanceof LoggedOut)) throw error;
      this.on.loggedOut();
    } finally {
      this.#isSending = false;
    }
  }

  async #sendFirst() {
    const letter = this.#letters[0];
    letter.tries += 1;
    write(this.#letters);
    try {
      const answer = await call(letter.method, letter.path, letter.body, letter.key);
      this.#drop();
      this.on.sent(letter, answer);
    } catch (error) {
      if (error instanceof Unreachable) return false;
      if (!(error instanceof Refused)) throw error;
      this.#drop();
      this.on.refused(letter, error);
    }
    return true;
  }

  #drop() {
    this.#letters.shift();
    write(this.#letters);
  }

  #sleep(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE) || "[]");
  } catch {
    return [];
  }
}

function write(letters) {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(letters));
  } catch {
    // No room, or storage is off: they are kept as long as the page is open.
  }
}
