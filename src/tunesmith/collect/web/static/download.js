// Charts as files: their points as CSV, the picture as SVG or PNG.
import { html } from "./dom.js";

const SCALE = 3; // pixels of a PNG for each one on the screen
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-family", "text-anchor", "color"];
const SVG = "http://www.w3.org/2000/svg";
const LINE_HEIGHT = 18;

/** The control of a chart that offers its files. */
export function downloads(chart) {
  const made = { CSV: csv, SVG: async () => new Blob([picture(chart).text], { type: "image/svg+xml" }), PNG: png };
  const buttons = Object.entries(made).map(([kind, make]) => {
    const button = html("button", { type: "button", "aria-label": `Download ${chart.title} as ${kind}` }, kind);
    button.addEventListener("click", async () => save(await make(chart), `${fileName(chart)}.${kind.toLowerCase()}`));
    if (kind === "CSV" && !chart.table) button.hidden = true;
    return button;
  });
  return html("details", { class: "download" }, html("summary", { "aria-label": `Download ${chart.title}` }, "Download"), html("div", {}, ...buttons));
}

const fileName = (chart) => [document.querySelector("h1")?.textContent, chart.title].join(" ").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");

function save(blob, name) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** One row for each step of any line; a value that is not finite is empty, as one that is not there. */
async function csv(chart) {
  const lines = await chart.table();
  const rows = new Map();
  lines.forEach(({ points }, place) => {
    for (const { step, value } of points) {
      if (!rows.has(step)) rows.set(step, Array(lines.length).fill(""));
      rows.get(step)[place] = value ?? "";
    }
  });
  const head = [chart.xName ?? "step", ...lines.map(({ label }) => label)].map(quoted);
  const body = [...rows].sort(([a], [b]) => a - b).map(([step, values]) => [step, ...values]);
  return new Blob([[head, ...body].map((row) => `${row.join(",")}\r\n`).join("")], { type: "text/csv" });
}

/** A text as CSV has it; one that a spreadsheet would take for a formula begins with an apostrophe. */
function quoted(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** The plot with title and legend, in the colours of the page, which a file does not know. */
function picture(chart) {
  const { width, height } = chart.plot.getBoundingClientRect();
  const entries = [...chart.legend.children];
  const whole = document.createElementNS(SVG, "svg");
  const total = height + LINE_HEIGHT * (2 + entries.length);
  for (const [name, value] of Object.entries({ xmlns: SVG, width, height: total, viewBox: `0 0 ${width} ${total}` })) whole.setAttribute(name, value);
  const page = getComputedStyle(chart.element);
  whole.append(shape("rect", { width, height: total, fill: page.backgroundColor }));
  const words = { "font-family": "sans-serif", "font-size": 13, fill: page.color };
  whole.append(shape("text", { ...words, x: 8, y: 16, "font-weight": "bold" }, chart.element.querySelector("figcaption > span").textContent));
  const plot = styled(chart.plot);
  for (const [name, value] of Object.entries({ y: LINE_HEIGHT + 6, width, height })) plot.setAttribute(name, value);
  whole.append(plot);
  entries.forEach((entry, place) => {
    const y = height + LINE_HEIGHT * (2 + place);
    whole.append(shape("rect", { x: 8, y: y - 5, width: 14, height: 3, fill: getComputedStyle(entry.querySelector(".swatch") ?? entry).color }));
    whole.append(shape("text", { ...words, x: 28, y }, entry.textContent));
  });
  return { text: new XMLSerializer().serializeToString(whole), width, height: total };
}

function shape(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** A copy whose elements carry their styles. */
function styled(element) {
  const copy = element.cloneNode(false);
  const style = getComputedStyle(element);
  copy.removeAttribute("style");
  copy.removeAttribute("class");
  for (const name of STYLES) copy.setAttribute(name, style.getPropertyValue(name));
  copy.append(...[...element.childNodes].map((child) => (child.nodeType === Node.ELEMENT_NODE ? styled(child) : child.cloneNode())));
  return copy;
}

async function png(chart) {
  const { text, width, height } = picture(chart);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = html("canvas", { width: Math.round(SCALE * width), height: Math.round(SCALE * height) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
