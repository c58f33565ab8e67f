// The login page, for a typed token or that of a one-time link, and the page of an invitation.
import { call, url } from "./api.js";
import { $ } from "./dom.js";

const query = new URLSearchParams(location.search);
const form = $("login") ?? $("join");

/** The page to go on to, if it is one of this server. A fragment survives the way here. */
function nextPage() {
  const root = url("");
  try {
    const wanted = new URL((query.get("next") ?? "").replace(/^[/\\]+/, ""), root);
    wanted.hash ||= location.hash;
    if (wanted.href.startsWith(root) && !wanted.href.startsWith(url("login"))) return wanted.href;
  } catch {
    // It is no address.
  }
  return root;
}

async function logIn(token) {
  const next = nextPage();
  await call("POST", "session", { token });
  location.replace(next);
}

/** Change the address; links, which are relative to the old one, keep leading where they led. */
function rename(path) {
  for (const link of document.querySelectorAll('a:not([href^="#"])')) link.setAttribute("href", link.href);
  history.replaceState(null, "", url(path));
}

/** Accept the invitation. Only the button does this, so that programs which fetch links do not use it up. */
async function join() {
  const token = decodeURIComponent(location.pathname.split("/").at(-1));
  const name = $("name").value.trim();
  const joined = await call("POST", "join", name ? { token, name } : { token });
  rename("login");
  $("token").textContent = joined.token;
  $("joined").hidden = false;
  form.hidden = true;
}

async function attempt(action) {
  $("status").textContent = "";
  try {
    await action();
  } catch (error) {
    $("status").textContent = error.message;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(form.id === "join" ? join : () => logIn($("token").value.trim()));
});
form.querySelector("button").disabled = false;

const linkToken = form.id === "login" && query.get("token");
if (linkToken) {
  // Used at once and removed from the address bar and the history.
  query.delete("token");
  rename(`login${query.size ? "?" : ""}${query}${location.hash}`);
  attempt(() => logIn(linkToken));
}
