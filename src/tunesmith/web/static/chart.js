// Charts as plain SVG, in the page's colours, without a library. The server thins their points to what a screen can show.
import { html, oncePerFrame, svg } from "./dom.js";

const HEIGHT = 190;
const EDGE = { left: 52, right: 10, top: 10, bottom: 24 };
const COLOURS = ["after", "before", "stage-3", "stage-5", "stage-6", "stage-4", "stage-2", "stage-7"];

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

/** Base of all charts: a figure with a title, a plot and a legend. */
class Chart {
  constructor(id, title, unit) {
    this.id = id;
    this.title = title;
    this.plot = svg("svg", { class: "plot", role: "img", height: HEIGHT, "aria-label": `${title}: no data yet` });
    this.legend = html("ul", { class: "legend" });
    this.element = html(
      "figure",
      { class: "chart", id: `chart-${id.replace(/\W+/g, "-")}` },
      html("figcaption", {}, title, unit ? html("span", { class: "unit" }, ` ${unit}`) : null),
      this.plot,
      this.legend,
    );
    this.draw = oncePerFrame(() => this.render());
    this.width = 0;
    new ResizeObserver((entries) => {
      this.width = Math.floor(entries[0].contentRect.width);
      this.draw();
    }).observe(this.plot);
  }

  /** Draw grid and axis labels for the two ranges; returns scales `x` and `y` from values to pixels. */
  frame([xLow, xHigh], [yLow, yHigh], xText = short) {
    const right = Math.max(EDGE.left + 1, this.width - EDGE.right);
    const bottom = HEIGHT - EDGE.bottom;
    const x = (value) => EDGE.left + ((value - xLow) / (xHigh - xLow || 1)) * (right - EDGE.left);
    const y = (value) => bottom - ((value - yLow) / (yHigh - yLow || 1)) * (bottom - EDGE.top);
    const grid = svg("g", { class: "grid-lines" });
    for (const value of ticks(yLow, yHigh, 4)) {
      grid.append(
        svg("line", { x1: EDGE.left, x2: right, y1: y(value), y2: y(value) }),
        svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
      );
    }
    for (const value of ticks(xLow, xHigh, Math.max(2, Math.floor(this.width / 90)))) {
      grid.append(svg("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, xText(value)));
    }
    this.plot.setAttribute("viewBox", `0 0 ${Math.max(1, this.width)} ${HEIGHT}`);
    this.plot.replaceChildren(grid);
    return { x, y, right, bottom };
  }
}

/** Lines over steps, updated point by point. */
export class LineChart extends Chart {
  constructor(id, title, unit, lines) {
    super(id, title, unit);
    this.lines = lines;
    this.xName = "step";
    this.smoothing = 0;
    this.pointed = null;
    this.values = lines.map((line, place) => {
      const value = html("b", {}, "–");
      this.legend.append(html("li", {}, html("i", { class: "swatch", style: colour(place) }), line.label, " ", value));
      return value;
    });
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.point(null));
  }

  point(place) {
    this.pointed = place;
    this.draw();
  }

  render() {
    if (!this.width) return;
    const steps = this.lines.flatMap(({ points }) => (points.length ? [points[0].step, points.at(-1).step] : []));
    if (!steps.length) {
      this.plot.replaceChildren();
      return;
    }
    const range = [Math.min(...steps), Math.max(...steps)];
    const values = this.lines.flatMap(({ points }) => points.map(({ value }) => value));
    const { x, y, right, bottom } = this.frame(range, rangeOf(values));
    this.lines.forEach((line, place) => this.drawLine(line, colour(place), x, y, bottom));
    const step = this.pointed === null ? null : stepAt(this.pointed, range, right);
    if (step !== null) {
      this.plot.append(svg("line", { class: "pointer", x1: x(step), x2: x(step), y1: EDGE.top, y2: bottom }));
    }
    this.updateLegend(step);
  }

  drawLine(line, style, x, y, bottom) {
    const places = line.points.map(({ step }) => x(step));
    const values = line.points.map(({ value }) => value);
    const group = svg("g", { style });
    group.append(svg("path", { class: this.smoothing ? "line raw" : "line", d: path(places, values, y) }));
    if (this.smoothing) group.append(svg("path", { class: "line", d: path(places, smooth(values, this.smoothing), y) }));
    const marks = places.filter((_, at) => values[at] === null);
    this.plot.append(group);
    if (!marks.length) return;
    const cross = (place) => `M${place.toFixed(1)} ${bottom - 7}m-3 -3l6 6m0 -6l-6 6`;
    this.plot.append(
      svg("path", { class: "not-finite", d: marks.map(cross).join("") }, svg("title", {}, `${line.label}: not finite here`)),
    );
  }

  /** Update the legend with the values at `step`, or the last ones, and the label for screen readers. */
  updateLegend(step) {
    this.lines.forEach((line, place) => {
      const point = step === null ? line.last : line.nearest(step);
      this.values[place].textContent = point ? short(point.value) : "–";
    });
    this.legend.dataset.step = step === null ? "" : `${this.xName} ${Math.round(step)}`;
    if (step !== null) return;
    const words = this.lines.filter((line) => line.points.length).map((line) => describe(line, this.xName));
    this.plot.setAttribute("aria-label", `${this.title}: ${words.join("; ")}`);
  }
}

/** Paths through points { step, x, y }, such as the reward of each run over its KL; points without both are left out. */
export class FrontierChart extends Chart {
  constructor() {
    super("frontier", "Reward against KL", "reward over the KL to the starting model in nats, from step to step");
    this.paths = [];
  }

  show(paths) {
    this.paths = paths.map(({ label, points }) => ({ label, points: points.filter(({ x, y }) => x !== null && y !== null) }));
    const drawn = this.paths.map(({ label, points }) => ({ label, last: points.at(-1) })).filter(({ last }) => last);
    const words = drawn.map(({ label, last }) => `${label} ${short(last.y)} at a KL of ${short(last.x)}, step ${last.step}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${words.join("; ") || "no data yet"}`);
    const swatch = (place) => html("i", { class: "swatch", style: colour(place) });
    this.legend.replaceChildren(...this.paths.map(({ label, points }, place) => html("li", {}, swatch(place), label, " ", html("b", {}, points.length ? short(points.at(-1).y) : "–"))));
    this.draw();
  }

  render() {
    if (!this.width) return;
    const all = this.paths.flatMap(({ points }) => points);
    const values = (name) => rangeOf(all.map((point) => point[name]));
    const { x, y } = this.frame(values("x"), values("y"));
    this.paths.forEach(({ label, points }, place) => {
      const places = points.map((point) => x(point.x));
      const group = svg("g", { style: colour(place) }, svg("path", { class: "line", d: path(places, points.map((point) => point.y), y) }));
      const last = points.at(-1);
      if (last) group.append(svg("circle", { cx: places.at(-1), cy: y(last.y), r: 3.5 }, svg("title", {}, `${label}, step ${last.step}`)));
      this.plot.append(group);
    });
  }
}

/** Win rate of each version against the base, with its interval; the serving version is filled. */
export class WinRateChart extends Chart {
  constructor() {
    super("win-rate", "Win rate against the base", "share of votes");
    this.versions = [];
  }

  show(versions) {
    this.versions = versions.filter(({ shown }) => shown);
    const last = this.versions.at(-1);
    const words = last ? `version ${last.version} at ${percent(last.shown.win_rate)}` : "no votes yet between versions";
    this.plot.setAttribute("aria-label", `${this.title}: ${words}`);
    this.draw();
  }

  render() {
    if (!this.width) return;
    const numbers = this.versions.map(({ version }) => version);
    const { x, y, right } = this.frame([Math.min(0, ...numbers) - 0.5, Math.max(1, ...numbers) + 0.5], [0, 1], whole);
    this.plot.append(svg("line", { class: "even", x1: EDGE.left, x2: right, y1: y(0.5), y2: y(0.5) }));
    for (const { version, shown, serving, accepted } of this.versions) {
      const kind = serving ? "after serving" : accepted ? "after" : "before dropped";
      const group = svg("g", { class: `win ${kind}`, "data-version": version });
      if (shown.low !== null) {
        group.append(svg("line", { x1: x(version), x2: x(version), y1: y(shown.low), y2: y(shown.high) }));
      }
      group.append(
        svg("circle", { cx: x(version), cy: y(shown.win_rate), r: 4 }),
        svg("title", {}, `version ${version}: ${interval(shown)}`),
      );
      this.plot.append(group);
    }
  }
}

/** Votes of each minute as bars; `bars` are [minutes ago, number]. */
export class BarChart extends Chart {
  constructor(id, title, unit) {
    super(id, title, unit);
    this.bars = [];
  }

  show(bars) {
    this.bars = bars;
    const total = bars.reduce((sum, [, number]) => sum + number, 0);
    this.plot.setAttribute("aria-label", `${this.title}: ${total} in the last hour, ${bars.at(-1)?.[1] ?? 0} in this minute`);
    this.draw();
  }

  render() {
    if (!this.width || !this.bars.length) return;
    const places = this.bars.map(([minute]) => minute);
    const range = [Math.min(...places) - 0.5, Math.max(...places) + 0.5];
    const highest = Math.max(4, ...this.bars.map(([, number]) => number));
    const { x, y, bottom } = this.frame(range, [0, highest], (minute) => (minute === 0 ? "now" : `${minute} min`));
    const width = Math.max(1, x(1) - x(0) - 1);
    for (const [minute, number] of this.bars) {
      if (!number) continue;
      const box = { x: x(minute) - width / 2, y: y(number), width, height: bottom - y(number), class: "bar-of-votes" };
      this.plot.append(svg("rect", box, svg("title", {}, `${number} votes`)));
    }
  }
}

export const percent = (share) => `${(100 * share).toFixed(0)} %`;

/** A win rate with its interval, as text. */
export function interval({ win_rate, low, high }) {
  return low === null ? percent(win_rate) : `${percent(win_rate)} (${percent(low)} to ${percent(high)})`;
}

const whole = (value) => (Number.isInteger(value) ? String(value) : "");
const colour = (place) => `color: var(--${COLOURS[place % COLOURS.length]})`;

function stepAt(place, [low, high], right) {
  const share = Math.min(1, Math.max(0, (place - EDGE.left) / (right - EDGE.left)));
  return low + share * (high - low);
}

/** Lowest and highest of `values` with a margin; null is left out. */
function rangeOf(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const margin = (high - low) * 0.05 || Math.abs(low) * 0.1 || 0.5;
  return [low - margin, high + margin];
}

/** SVG path through all finite points, interrupted at gaps; a point between two gaps becomes a dot. */
function path(places, values, y) {
  const isFinite = (at) => values[at] !== null && values[at] !== undefined;
  const parts = [];
  places.forEach((place, at) => {
    if (!isFinite(at)) return;
    const goesOn = isFinite(at - 1);
    parts.push(`${goesOn ? "L" : "M"}${place.toFixed(1)} ${y(values[at]).toFixed(1)}`);
    if (!goesOn && !isFinite(at + 1)) parts.push("h0");
  });
  return parts.join("");
}

function describe(line, xName) {
  const finite = line.points.filter(({ value }) => value !== null).map(({ value }) => value);
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const gaps = line.points.length - finite.length;
  const last = `${line.label} ${short(line.last.value)} at ${xName} ${Number(line.last.step.toPrecision(8))}`;
  if (!finite.length) return last;
  return `${last}, between ${short(low)} and ${short(high)}${gaps ? `, ${gaps} not finite` : ""}`;
}
