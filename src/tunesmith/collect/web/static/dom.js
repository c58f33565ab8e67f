// Access to elements and creation of them. Text is always set as text nodes, so generated text and names cannot become markup (XSS).

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; children are nodes or text. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element; children are nodes or text. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Show `words` in the line of status, which screen readers announce even if they were there before. */
export function announce(words, isBad = false) {
  $("status").textContent = words;
  $("status").classList.toggle("bad", isBad);
}

/** Show `words` in the line of status; what is there already is not announced again. */
export function say(words, isBad = false) {
  if ($("status").textContent !== words) announce(words, isBad);
}

/** A function that runs `draw` once before the next frame, however often it is called. */
export function oncePerFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

/** True while an input method composes a character: its Enter and Escape are no keys for the page. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229; // 229: Safari, after the composition

/** The control that names the key of this event in `aria-keyshortcuts`; undefined if there is none.
 *
 * Keys are named by what they type, as is printed on them, or else by their place: letters of other scripts, and digits
 * that need Shift (AZERTY). Undo also works while the next pair is being fetched.
 */
export function controlOfKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || isComposing(event)) return undefined;
  const typed = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  return controlNamed(typed) ?? controlNamed(placeOf(event));
}

function controlNamed(key) {
  if (!key) return undefined;
  const controls = document.querySelectorAll(`[aria-keyshortcuts="${CSS.escape(key)}"]`);
  return [...controls].find((control) => !control.closest("[hidden]:not(#table)"));
}

/** The letter or digit of an American keyboard at the place of this key; empty for other keys. */
function placeOf(event) {
  const [, letter, digit] = /^(?:Key([A-Z])|Digit([0-9]))$/.exec(event.code) ?? [];
  const isNamed = event.key.length > 1 && event.key !== "Dead"; // Enter, F1
  if (isNamed || (digit && event.shiftKey) || event.getModifierState("AltGraph")) return "";
  return (letter ?? digit ?? "").toLowerCase();
}

/** A size in the unit that fits it. */
export function bytes(size) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, size < 1000 ? 0 : Math.floor(Math.log10(size) / 3));
  return `${power ? (size / 1000 ** power).toPrecision(3) : Math.round(size)} ${units[power]}`;
}

/** The last error in what a process printed, from its first line on; empty if there is none. */
export function errorIn(output) {
  const start = Math.max(output.lastIndexOf("\nerror: "), output.startsWith("error: ") ? 0 : -1, output.lastIndexOf("\nTraceback "));
  return start < 0 ? "" : output.slice(start).trim();
}
