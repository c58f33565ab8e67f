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

/** The control that names this key in `aria-keyshortcuts`. Undo also works while the next pair is being fetched. */
export function controlOfKey(key) {
  const controls = document.querySelectorAll(`[aria-keyshortcuts="${CSS.escape(key)}"]`);
  return [...controls].find((control) => !control.closest("[hidden]:not(#table)"));
}
