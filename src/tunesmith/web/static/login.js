// Logs in by a token that is typed, or by the one in the address of a link, which is used at once and taken out of sight.
import { call } from "./api.js";

const status = document.getElementById("status");

async function logIn(token) {
  status.textContent = "";
  try {
    await call("POST", "session", { token });
    location.replace("/vote");
  } catch (error) {
    status.textContent = error.message;
  }
}

document.getElementById("login").addEventListener("submit", (event) => {
  event.preventDefault();
  logIn(document.getElementById("token").value.trim());
});

const given = new URLSearchParams(location.search).get("token");
if (given) {
  history.replaceState(null, "", "/login");
  logIn(given);
}
