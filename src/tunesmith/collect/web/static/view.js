// What all charts of a page have in common: zoom, scale, smoothing and cursor, and the controls that change them.
import { $, oncePerFrame } from "./dom.js";

export class View {
  charts = new Set();
  zoom = null; // [first, last] of what the horizontal axis shows; null shows everything
  isLog = false;
  smoothing = 0;
  at = null; // where the cursor is

  constructor() {
    this.showPointers = oncePerFrame(() => this.charts.forEach((chart) => chart.showPointer()));
    $("smoothing").addEventListener("input", ({ target }) => {
      $("smoothing-value").textContent = target.value;
      this.change({ smoothing: Number(target.value) });
    });
    $("log").addEventListener("change", ({ target }) => this.change({ isLog: target.checked }));
    $("zoom").addEventListener("change", () => {
      const [from, to] = [$("zoom-from").valueAsNumber, $("zoom-to").valueAsNumber];
      if (from < to) this.change({ zoom: [from, to] });
    });
    $("zoom-out").addEventListener("click", () => this.change({ zoom: null }));
  }

  /** Change any of the fields, and draw everything anew. */
  change(fields) {
    Object.assign(this, fields);
    const [from, to] = this.zoom ?? ["", ""];
    const shown = (value) => (value === "" ? "" : Number(value.toPrecision(6)));
    if (document.activeElement !== $("zoom-from")) $("zoom-from").value = shown(from);
    if (document.activeElement !== $("zoom-to")) $("zoom-to").value = shown(to);
    $("zoom-out").hidden = !this.zoom;
    for (const chart of this.charts) chart.draw();
  }

  /** Move the cursor of all charts; null hides it. */
  point(at) {
    this.at = at;
    this.showPointers();
  }
}
