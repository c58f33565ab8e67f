// Charts as plain SVG, in the page's colours, without a library. The server thins their points to what a screen can show.
import { html, oncePerFrame, svg } from "./dom.js";
import { downloads } from "./download.js";

const HEIGHT = 190;
const DOT = 3; // radius of a point without neighbours
const MIN_DRAG = 5; // pixels
export const EDGE = { left: 52, right: 10, top: 10, bottom: 24 };
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

/** Powers of ten between `low` and `high`, and the numbers between them where those are few. */
export function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.ceil((last - first) / 5) || 1;
  const factors = last - first <= 1 ? [1, 2, 3, 5, 7] : last - first <= 3 ? [1, 3] : [1];
  const found = [];
  for (let power = first; power <= last; power += every) found.push(...factors.map((factor) => factor * 10 ** power));
  return found.filter((value) => value >= low && value <= high);
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** Base of all charts: a figure with a title, a plot, a legend, and its download. */
export class Chart {
  constructor(id, title, unit) {
    this.id = id;
    this.title = title;
    this.plot = svg("svg", { class: "plot", role: "img", height: HEIGHT, "aria-label": `${title}: no data yet` });
    this.legend = html("ul", { class: "legend" });
    this.element = html(
      "figure",
      { class: "chart", id: `chart-${id.replace(/\W+/g, "-")}` },
      html("figcaption", {}, html("span", {}, title, unit ? html("span", { class: "unit" }, ` ${unit}`) : null), downloads(this)),
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
  frame([xLow, xHigh], [yLow, yHigh], { xText = short, isLog = false } = {}) {
    const right = Math.max(EDGE.left + 1, this.width - EDGE.right);
    const bottom = HEIGHT - EDGE.bottom;
    const [low, high] = isLog ? [Math.log10(yLow), Math.log10(yHigh)] : [yLow, yHigh];
    const x = (value) => EDGE.left + ((value - xLow) / (xHigh - xLow || 1)) * (right - EDGE.left);
    const y = (value) => bottom - (((isLog ? Math.log10(value) : value) - low) / (high - low || 1)) * (bottom - EDGE.top);
    const grid = svg("g", { class: "grid-lines" });
    for (const value of isLog ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 4)) {
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

/** Lines over steps, updated point by point. All charts of a `View` have its zoom, scale, smoothing and cursor. */
export class LineChart extends Chart {
  constructor(id, title, unit, lines, view) {
    super(id, title, unit);
    this.lines = lines;
    this.view = view;
    this.xName = "step";
    this.pointer = svg("line", { class: "pointer" });
    this.selection = svg("rect", { class: "selection", y: EDGE.top, height: HEIGHT - EDGE.top - EDGE.bottom });
    this.values = lines.map((line, place) => {
      const value = html("b", {}, "–");
      this.legend.append(html("li", {}, html("i", { class: "swatch", style: colour(place) }), line.label, " ", value));
      return value;
    });
    view.charts.add(this);
    this.listen();
  }

  /** Point by the mouse, zoom by a drag, and show everything again by a double click. */
  listen() {
    let from = null; // where a drag began
    const end = (event) => {
      if (from !== null && this.scales && Math.abs(event.offsetX - from) >= MIN_DRAG) {
        const [low, high] = [from, event.offsetX].sort((a, b) => a - b).map((place) => this.stepAt(place));
        if (high > low) this.view.change({ zoom: [low, high] });
      }
      from = null;
      this.selection.remove();
    };
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = event.offsetX;
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.scales) return;
      this.view.point(this.stepAt(event.offsetX));
      if (from === null || Math.abs(event.offsetX - from) < MIN_DRAG) return;
      const [low, high] = [from, event.offsetX].sort((a, b) => a - b).map((place) => this.scales.x(this.stepAt(place)));
      for (const [name, value] of [["x", low], ["width", high - low]]) this.selection.setAttribute(name, value);
      this.plot.append(this.selection);
    });
    this.plot.addEventListener("pointerup", end);
    this.plot.addEventListener("pointercancel", end);
    this.plot.addEventListener("pointerleave", () => this.view.point(null));
    this.plot.addEventListener("dblclick", () => this.view.change({ zoom: null }));
  }

  /** The step at a place of the plot. */
  stepAt(place) {
    const { range: [low, high], right } = this.scales;
    return low + Math.min(1, Math.max(0, (place - EDGE.left) / (right - EDGE.left))) * (high - low);
  }

  render() {
    this.scales = null;
    if (!this.width) return;
    const steps = this.lines.flatMap(({ points }) => (points.length ? [points[0].step, points.at(-1).step] : []));
    if (!steps.length) {
      this.plot.replaceChildren();
      return;
    }
    const range = this.view.zoom ?? [Math.min(...steps), Math.max(...steps)];
    // One point beyond each end, so that lines go on to the edge.
    const shown = this.lines.map(({ points }) => points.slice(Math.max(0, firstAt(points, range[0]) - 1), firstAt(points, range[1]) + 1));
    const values = shown.flatMap((points) => points.map(({ value }) => value)).filter((value) => !this.view.isLog || value > 0);
    const { x, y, right, bottom } = this.frame(range, rangeOf(values, this.view.isLog), { isLog: this.view.isLog });
    const inside = svg("svg", { class: "inside", x: EDGE.left - DOT, y: 0, width: right - EDGE.left + 2 * DOT, height: HEIGHT, viewBox: `${EDGE.left - DOT} 0 ${right - EDGE.left + 2 * DOT} ${HEIGHT}` });
    this.plot.append(inside);
    shown.forEach((points, place) => this.drawLine(inside, this.lines[place].label, points, colour(place), { x, y, bottom }));
    this.scales = { x, right, range, bottom };
    this.showPointer();
    const words = this.lines.filter((line) => line.points.length).map((line) => describe(line, this.xName));
    this.plot.setAttribute("aria-label", `${this.title}: ${words.join("; ")}`);
  }

  drawLine(inside, label, points, style, { x, y, bottom }) {
    const { smoothing, isLog } = this.view;
    const drawn = (value) => (isLog && value !== null && value <= 0 ? null : value);
    const places = points.map(({ step }) => x(step));
    const values = points.map(({ value }) => drawn(value));
    const group = svg("g", { style });
    group.append(svg("path", { class: smoothing ? "line raw" : "line", d: path(places, values, y) }));
    if (smoothing) group.append(svg("path", { class: "line", d: path(places, smooth(values, smoothing), y) }));
    values.forEach((value, at) => {
      const isAlone = value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null;
      if (isAlone) group.append(svg("circle", { cx: places[at], cy: y(value), r: DOT }));
    });
    inside.append(group);
    const marks = places.filter((_, at) => values[at] === null);
    if (!marks.length) return;
    const cross = (place) => `M${place.toFixed(1)} ${bottom - 7}m-3 -3l6 6m0 -6l-6 6`;
    const why = isLog ? "not finite, or not above 0" : "not finite";
    inside.append(svg("path", { class: "not-finite", d: marks.map(cross).join("") }, svg("title", {}, `${label}: ${why} here`)));
  }

  /** Show the cursor, and in the legend the values there, or the last ones. */
  showPointer() {
    if (!this.scales) return;
    const { x, bottom, range: [low, high] } = this.scales;
    const at = this.view.at;
    const isShown = at !== null && at >= low && at <= high;
    this.lines.forEach((line, place) => {
      const point = isShown ? line.nearest(at) : line.last;
      this.values[place].textContent = point ? short(point.value) : "–";
    });
    this.legend.dataset.step = isShown ? `${this.xName} ${short(Math.abs(at) < 10 && this.xName !== "step" ? at : Math.round(at))}` : "";
    if (!isShown) return this.pointer.remove();
    for (const [name, value] of Object.entries({ x1: x(at), x2: x(at), y1: EDGE.top, y2: bottom })) this.pointer.setAttribute(name, value);
    this.plot.append(this.pointer);
  }

  /** Labels and points of each line, for a file: as many of each as the page can get. */
  async table() {
    return this.lines.map(({ label, points }) => ({ label, points }));
  }
}

export const colour = (place) => `color: var(--${COLOURS[place % COLOURS.length]})`;

/** Lowest and highest of `values` with a margin; null is left out. */
export function rangeOf(values, isLog = false) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return isLog ? [1, 10] : [0, 1];
  if (isLog) return [low / (high / low || 1) ** 0.05 / (low === high ? 2 : 1), high * (high / low) ** 0.05 * (low === high ? 2 : 1)];
  const margin = (high - low) * 0.05 || Math.abs(low) * 0.1 || 0.5;
  return [low - margin, high + margin];
}

/** SVG path through all finite points, interrupted at gaps. */
export function path(places, values, y) {
  const isFinite = (at) => values[at] !== null && values[at] !== undefined;
  const parts = [];
  places.forEach((place, at) => {
    if (!isFinite(at)) return;
    parts.push(`${isFinite(at - 1) ? "L" : "M"}${place.toFixed(1)} ${y(values[at]).toFixed(1)}`);
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
