// Logs in by a token that is typed, or by the one in the address of a link, which is used at once and taken out of sight.
import { call } from "./api.js";

const PAGES = ["/vote", "/watch", "/raters"];
const asked = new URLSearchParams(location.search);
const status = document.getElementById("status");

async function logIn(token) {
  status.textContent = "";
  try {
    await call("POST", "session", { token });
    location.replace(PAGES.find((page) => page === asked.get("next")) ?? "/vote");
  } catch (error) {
    status.textContent = error.message;
  }
}

const form = document.getElementById("login");

form.addEventListener("submit", (event) => {
  event.preventDefault();
  logIn(document.getElementById("token").value.trim());
});
form.querySelector("button").disabled = false;

const given = asked.get("token");
if (given) {
  history.replaceState(null, "", "/login");
  logIn(given);
}
