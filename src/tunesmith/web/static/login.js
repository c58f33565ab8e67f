// The login page, for a typed token or that of a one-time link, and the page of an invitation.
import { call } from "./api.js";
import { $ } from "./dom.js";

const PAGE = /^\/(vote|watch|raters|runs(\/[0-9a-f]{12})?)$/;
const query = new URLSearchParams(location.search);
const form = $("login") ?? $("join");

async function logIn(token) {
  await call("POST", "session", { token });
  location.replace(PAGE.test(query.get("next")) ? query.get("next") : "/");
}

/** Accept the invitation. Only the button does this, so that programs which fetch links do not use it up. */
async function join() {
  const token = decodeURIComponent(location.pathname.split("/").at(-1));
  const name = $("name").value.trim();
  const joined = await call("POST", "join", name ? { token, name } : { token });
  history.replaceState(null, "", "/login");
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
  history.replaceState(null, "", "/login");
  attempt(() => logIn(linkToken));
}
