// Charts over something else than steps: reward over KL, win rates of versions, votes by minute.
import { Chart, colour, EDGE, path, rangeOf, short } from "./chart.js";
import { html, svg } from "./dom.js";

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
    const { x, y, right } = this.frame([Math.min(0, ...numbers) - 0.5, Math.max(1, ...numbers) + 0.5], [0, 1], { xText: whole });
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
    const { x, y, bottom } = this.frame(range, [0, highest], { xText: (minute) => (minute === 0 ? "now" : `${minute} min`) });
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
