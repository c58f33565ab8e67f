// Persistent queue of requests. They are stored before they are sent, in the order of the rater's actions, and retried
// with the same idempotency key until the server has answered. A reload of the page resumes the queue.
import { call, LoggedOut, newKey, Refused, Unreachable, url } from "./api.js";

const STORE = `tunesmith.outbox ${url("")}`; // another server may have another prefix of the same host
const FIRST_WAIT_MS = 400;
const LAST_WAIT_MS = 8_000;

export class Outbox {
  #requests = read();
  #isSending = false;
  #wake = () => {};

  /** `on` has the callbacks `sent(request, answer)`, `refused(request, error)`, `waiting(count)`, `loggedOut()`. */
  constructor(on) {
    this.on = on;
    window.addEventListener("online", () => this.#wake());
  }

  get size() {
    return this.#requests.length;
  }

  /** Paths of the unsent requests. */
  get paths() {
    return this.#requests.map((request) => request.path);
  }

  add(method, path, body) {
    this.#requests.push({ key: newKey(), method, path, body, tries: 0 });
    write(this.#requests);
    this.send();
  }

  /** Send all requests, oldest first. Harmless while it is sending. */
  async send() {
    if (this.#isSending) return;
    this.#isSending = true;
    try {
      let wait = FIRST_WAIT_MS;
      while (this.#requests.length) {
        const isSent = await this.#sendFirst();
        if (isSent) {
          wait = FIRST_WAIT_MS;
        } else {
          this.on.waiting(this.#requests.length);
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
    const request = this.#requests[0];
    request.tries += 1;
    write(this.#requests);
    try {
      const answer = await call(request.method, request.path, request.body, request.key);
      this.#drop();
      this.on.sent(request, answer);
    } catch (error) {
      if (error instanceof Unreachable) return false;
      if (!(error instanceof Refused)) throw error;
      this.#drop();
      this.on.refused(request, error);
    }
    return true;
  }

  #drop() {
    this.#requests.shift();
    write(this.#requests);
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

function write(requests) {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(requests));
  } catch {
    // Storage is full or disabled: the requests are kept in memory only.
  }
}
