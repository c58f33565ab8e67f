// The presentations that this tab holds: the one that is shown, and the next one, which is fetched ahead.
import { call } from "./api.js";

const AHEAD = 2;
const MOST = 20;

export class Desk {
  #held = []; // The first one is shown.
  #answered = new Set(); // Answered here, whether or not the server knows it yet.
  #release = new Map();

  get current() {
    return this.#held[0] ?? null;
  }

  /** Fetch until `AHEAD` are held or there are no more. Returns the progress that the server told. */
  async fill() {
    let count = AHEAD;
    for (;;) {
      const { presentations, progress } = await call("GET", `next?count=${count}`);
      for (const presentation of presentations) {
        if (this.#held.length < AHEAD && this.#isNew(presentation) && (await this.#claim(presentation.token))) {
          this.#held.push(presentation);
        }
      }
      // The rest of what came belongs to other tabs, or is answered and on its way.
      if (this.#held.length >= AHEAD || presentations.length < count || count === MOST) return progress;
      count = Math.min(MOST, count + 4);
    }
  }

  /** Put the first one away as answered, and return it. */
  answer() {
    const presentation = this.#held.shift();
    this.#answered.add(presentation.token);
    return presentation;
  }

  /** Show an answered one again, before all others. */
  takeBack(presentation) {
    this.#answered.delete(presentation.token);
    this.#held.unshift(presentation);
  }

  /** The server knows that it is answered, or will not take an answer. */
  settle(token) {
    this.#release.get(token)?.();
    this.#release.delete(token);
  }

  /** Forget a presentation that the server does not want answered any more. */
  drop(token) {
    this.#answered.add(token);
    this.#held = this.#held.filter((presentation) => presentation.token !== token);
    this.settle(token);
  }

  markAnswered(token) {
    this.#answered.add(token);
  }

  #isNew(presentation) {
    return !this.#answered.has(presentation.token) && this.#held.every((held) => held.token !== presentation.token);
  }

  /** True if no other tab holds it. A lock ends with its tab, however that ends. */
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
