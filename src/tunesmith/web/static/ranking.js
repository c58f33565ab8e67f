// An order of three or more answers, made by naming them from the best to the worst. Equal places are ties.

export class Ranking {
  #groups = [];
  #isLevel = false;

  constructor(count) {
    this.count = count;
  }

  /** True if the next answer that is named shares the place of the last one. */
  get isLevel() {
    return this.#isLevel;
  }

  get isWhole() {
    return this.#groups.flat().length === this.count;
  }

  /** Place of each answer, 1 the best; null where it has none yet. Of two that tie at 1, the next one is at 3. */
  get ranks() {
    const ranks = Array(this.count).fill(null);
    let place = 1;
    for (const group of this.#groups) {
      for (const index of group) ranks[index] = place;
      place += group.length;
    }
    return ranks;
  }

  /** Name an answer as the next one; naming it again takes it out. */
  name(index) {
    if (index >= this.count) return;
    if (this.#groups.flat().includes(index)) {
      this.#groups = this.#groups.map((group) => group.filter((one) => one !== index)).filter((group) => group.length);
    } else if (this.#isLevel && this.#groups.length) {
      this.#groups.at(-1).push(index);
    } else {
      this.#groups.push([index]);
    }
    this.#isLevel = false;
  }

  /** Let the next one tie with the last one, or not after all. */
  toggleLevel() {
    this.#isLevel = !this.#isLevel && this.#groups.length > 0;
  }

  /** Take out the one that was named last. */
  back() {
    this.#isLevel = false;
    this.#groups.at(-1)?.pop();
    this.#groups = this.#groups.filter((group) => group.length);
  }

  /** Place the only one that is left, if only one is. */
  finish() {
    const left = this.ranks.flatMap((rank, index) => (rank === null ? [index] : []));
    if (left.length === 1) this.name(left[0]);
  }
}
