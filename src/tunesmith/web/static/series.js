// Points of one metric, thinned to what a screen can show; independent of the page.

export const MAX_POINTS = 1200;

/** One metric of a chart: points { step, time, value } in the order of steps; value is null if not finite. */
export class Line {
  constructor(name, label) {
    this.name = name;
    this.label = label;
    this.clear();
  }

  clear() {
    this.points = [];
    this.lastId = 0;
    this.first = null;
  }

  /** Add a point; false if it was added before, as after a reconnection. Ids grow. */
  add(id, step, time, value) {
    if (id <= this.lastId) return false;
    this.lastId = id;
    // A resumed run repeats the steps after its checkpoint, which replace the earlier ones.
    if (this.points.length && step <= this.points.at(-1).step) this.points.length = firstAt(this.points, step);
    this.points.push({ step, time, value });
    if (this.points.length > 2 * MAX_POINTS) this.points = thin(this.points, MAX_POINTS);
    return true;
  }

  get last() {
    return this.points.at(-1);
  }

  /** The point with the nearest step, or undefined. */
  nearest(step) {
    const after = firstAt(this.points, step);
    const before = this.points[after - 1];
    const next = this.points[after];
    if (!before || !next) return before ?? next;
    return step - before.step < next.step - step ? before : next;
  }
}

/** Index of the first point at `step` or later. */
function firstAt(points, step) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** About `limit` of the points: the minimum, the maximum and one gap of each bucket. */
export function thin(points, limit) {
  const size = Math.ceil((3 * points.length) / limit);
  const kept = [];
  for (let start = 0; start < points.length; start += size) {
    const indices = new Set();
    let low = -1;
    let high = -1;
    for (let at = start; at < Math.min(start + size, points.length); at += 1) {
      const { value } = points[at];
      if (value === null) {
        if (!indices.size) indices.add(at);
        continue;
      }
      if (low < 0 || value < points[low].value) low = at;
      if (high < 0 || value > points[high].value) high = at;
    }
    if (low >= 0) indices.add(low).add(high);
    kept.push(...[...indices].sort((a, b) => a - b));
  }
  return kept.map((at) => points[at]);
}

/** Exponential moving average with bias correction; gaps stay gaps. */
export function smooth(values, weight) {
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** About `count` round numbers between `low` and `high`. */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
