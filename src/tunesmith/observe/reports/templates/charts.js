// Draws the charts of the page in the reader's colours. Figures come as JSON in the light palette.
"use strict";
(function () {
  const root = document.documentElement;
  const store = document.getElementById("chart-data");
  const { dark, charts } = store ? JSON.parse(store.textContent) : { dark: {}, charts: {} };
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
  }

  function recolour(value) {
    if (typeof value === "string") return Object.hasOwn(dark, value) ? dark[value] : value;
    if (Array.isArray(value)) return value.map(recolour);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recolour(item)]));
    }
    return value;
  }

  function draw(element) {
    if (!window.Plotly || element.closest("details:not([open])")) return; // A closed fold is drawn when it opens.
    const figure = charts[element.dataset.chart];
    const copy = isDark() ? recolour(figure) : structuredClone(figure);
    window.Plotly.react(element, copy.data, copy.layout, { displayModeBar: false, responsive: true });
  }

  function drawAll() {
    document.querySelectorAll(".plot").forEach(draw);
  }

  const button = document.getElementById("theme");
  function nameButton() {
    button.textContent = isDark() ? "Light mode" : "Dark mode";
  }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameButton();
    drawAll();
  });
  systemDark.addEventListener("change", () => {
    nameButton();
    drawAll();
  });
  document.querySelectorAll("details").forEach((fold) => {
    fold.addEventListener("toggle", () => fold.querySelectorAll(".plot").forEach(draw));
  });
  // Print on paper colours, and open what is folded.
  window.addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    document.querySelectorAll("details.print").forEach((fold) => (fold.open = true));
    drawAll();
  });
  nameButton();
  drawAll();
})();
