// Takes an invitation when the button is pressed: a program that only looks at the link does not use it up.
import { call } from "./api.js";

const form = document.getElementById("join");
const status = document.getElementById("status");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = decodeURIComponent(location.pathname.split("/").at(-1));
  const name = document.getElementById("name").value.trim();
  status.textContent = "";
  try {
    const joined = await call("POST", "join", name ? { token, name } : { token });
    history.replaceState(null, "", "/login");
    document.getElementById("token").textContent = joined.token;
    document.getElementById("joined").hidden = false;
    form.hidden = true;
  } catch (error) {
    status.textContent = error.message;
  }
});
form.querySelector("button").disabled = false;
