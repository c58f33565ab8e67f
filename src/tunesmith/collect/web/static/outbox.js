// Persistent queue of requests. They are stored before they are sent, in the order of the rater's actions, and retried
// with the same idempotency key until the server has answered. Each tab has a queue of its own in the browser's storage;
// those of tabs that were closed are taken over by the next one.
import { call, LoggedOut, newKey, Refused, Unreachable } from "./api.js";
import { load, names, save } from "./storage.js";

const QUEUES = "outbox.";
const FIRST_WAIT_MS = 400;
const LAST_WAIT_MS = 8_000;

export class Outbox {
  #name = QUEUES + newKey();
  #requests = [];
  #isSending = false;
  #isKept = true; // over the end of the tab
  #hasFailed = false;
  #wake = () => {};

  /** `on` has the callbacks `sent(request, answer)`, `refused(request, error)`, `waiting(count)`, `loggedOut()`. */
  constructor(on) {
    this.on = on;
    // Held as long as the tab is open, so that no other takes this queue over.
    navigator.locks?.request(this.#name, () => new Promise(() => {}));
    window.addEventListener("online", () => this.#wake());
    window.addEventListener("beforeunload", (event) => {
      if (this.#requests.length && (this.#hasFailed || !this.#isKept)) event.preventDefault();
    });
  }

  get size() {
    return this.#requests.length;
  }

  /** Paths of the unsent requests. */
  get paths() {
    return this.#requests.map((request) => request.path);
  }

  /** Send a request as soon as possible; `label` says what it does. */
  add(method, path, body, label) {
    this.#requests.push({ key: newKey(), method, path, body, label });
    this.#store();
    this.send();
  }

  /** Take over what closed tabs have left. */
  async adopt() {
    for (const name of names(QUEUES).filter((one) => one !== this.#name)) {
      const take = () => {
        this.#requests = [...(load(name) ?? []), ...this.#requests];
        this.#store();
        save(name, null);
      };
      // Without locks another tab may send the same requests: their keys make that harmless.
      if (navigator.locks) await navigator.locks.request(name, { ifAvailable: true }, (lock) => lock && take());
      else take();
    }
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
          this.#hasFailed = false;
        } else {
          this.#hasFailed = true;
          this.on.waiting(this.#requests.length);
          await this.#sleep(wait);
          wait = Math.min(wait * 2, LAST_WAIT_MS);
        }
      }
      this.on.waiting(0);
    } catch (error) {
      if (!(error instanceof LoggedOut)) throw error;
      this.#hasFailed = false; // what waits is sent after the login
      this.on.loggedOut();
    } finally {
      this.#isSending = false;
    }
  }

  async #sendFirst() {
    const request = this.#requests[0];
    try {
      const answer = await call(request.method, request.path, request.body, request.key);
      this.#drop(request);
      this.on.sent(request, answer);
    } catch (error) {
      if (error instanceof Unreachable) return false;
      if (!(error instanceof Refused)) throw error;
      this.#drop(request);
      this.on.refused(request, error);
    }
    return true;
  }

  #drop(request) {
    this.#requests = this.#requests.filter((one) => one !== request);
    this.#store();
  }

  #store() {
    this.#isKept = save(this.#name, this.#requests.length ? this.#requests : null);
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
