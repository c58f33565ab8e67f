// A ranking of three or more answers, entered from the best to the worst. Equal ranks are ties.

export class Ranking {
  #groups = [];
  #isTie = false;

  constructor(count) {
    this.count = count;
  }

  /** True if the next answer ties with the last one. */
  get isTie() {
    return this.#isTie;
  }

  get isComplete() {
    return this.#groups.flat().length === this.count;
  }

  /** Rank of each answer, 1 the best; null if it has none yet. After a tie of two at 1 comes rank 3. */
  get ranks() {
    const ranks = Array(this.count).fill(null);
    let place = 1;
    for (const group of this.#groups) {
      for (const index of group) ranks[index] = place;
      place += group.length;
    }
    return ranks;
  }

  /** Rank an answer next; a ranked one is removed instead. */
  toggle(index) {
    if (index >= this.count) return;
    if (this.#groups.flat().includes(index)) {
      this.#groups = this.#groups.map((group) => group.filter((one) => one !== index)).filter((group) => group.length);
    } else if (this.#isTie && this.#groups.length) {
      this.#groups.at(-1).push(index);
    } else {
      this.#groups.push([index]);
    }
    this.#isTie = false;
  }

  /** Switch whether the next answer ties with the last one. */
  toggleTie() {
    this.#isTie = !this.#isTie && this.#groups.length > 0;
  }

  /** Remove the last ranked answer. */
  back() {
    this.#isTie = false;
    this.#groups.at(-1)?.pop();
    this.#groups = this.#groups.filter((group) => group.length);
  }

  /** Rank the last remaining answer, if only one is left. */
  finish() {
    const left = this.ranks.flatMap((rank, index) => (rank === null ? [index] : []));
    if (left.length === 1) this.toggle(left[0]);
  }
}
