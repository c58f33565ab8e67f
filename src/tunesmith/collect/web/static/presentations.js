// Queue of the presentations that this tab holds: the one that is shown, and prefetched ones.
import { call } from "./api.js";

const QUEUE_LENGTH = 2;
const MAX_COUNT = 20; // limit of the server

export class PresentationQueue {
  #queue = []; // The first one is shown.
  #answered = new Set(); // Tokens answered here, including votes not yet sent.
  #release = new Map(); // token -> function that releases its lock

  get current() {
    return this.#queue[0] ?? null;
  }

  /** Fetch until the queue is full or there are no more. Returns the rater's progress. */
  async fill() {
    let count = QUEUE_LENGTH;
    for (;;) {
      const { presentations, progress } = await call("GET", `next?count=${count}`);
      for (const presentation of presentations) {
        if (this.#queue.length < QUEUE_LENGTH && this.#isNew(presentation) && (await this.#claim(presentation.token))) {
          this.#queue.push(presentation);
        }
      }
      // The others belong to other tabs, or their votes are still being sent.
      if (this.#queue.length >= QUEUE_LENGTH || presentations.length < count || count === MAX_COUNT) return progress;
      count = Math.min(MAX_COUNT, count + 4);
    }
  }

  /** Remove the first one as answered, and return it. */
  answer() {
    const presentation = this.#queue.shift();
    this.#answered.add(presentation.token);
    return presentation;
  }

  /** Put an answered one back to the front of the queue (undo). */
  takeBack(presentation) {
    this.#answered.delete(presentation.token);
    this.#queue.unshift(presentation);
    this.#claim(presentation.token);
  }

  /** Release the lock of a presentation: the server has its answer, or refused it. */
  settle(token) {
    this.#release.get(token)?.();
    this.#release.delete(token);
  }

  /** Remove a presentation for which the server refused the answer. */
  drop(token) {
    this.#answered.add(token);
    this.#queue = this.#queue.filter((presentation) => presentation.token !== token);
    this.settle(token);
  }

  markAnswered(token) {
    this.#answered.add(token);
  }

  #isNew(presentation) {
    return !this.#answered.has(presentation.token) && this.#queue.every((held) => held.token !== presentation.token);
  }

  /** Lock a presentation against other tabs; false if another tab holds it. The browser releases locks of closed tabs. */
  #claim(token) {
    if (!navigator.locks || this.#release.has(token)) return Promise.resolve(true);
    return new Promise((resolve) => {
      navigator.locks.request(`presentation ${token}`, { ifAvailable: true }, (lock) => {
        if (!lock) {
          resolve(false);
          return null;
        }
        return new Promise((release) => {
          this.#release.set(token, release);
          resolve(true);
        });
      });
    });
  }
}
