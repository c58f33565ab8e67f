// The admin's page of import and export: sends a file, and shows how far its import is.
import { api, call } from "./api.js";
import { $ } from "./dom.js";

const POLL_MS = 500;
const button = document.querySelector("#import button");
const showStatus = (text) => ($("status").textContent = text);
const count = (number) => number.toLocaleString("en");

function show(step, part) {
  $("running").hidden = false;
  $("step").textContent = step;
  if (part === null) $("bar").removeAttribute("value");
  else $("bar").value = part;
}

function end(text, isGood) {
  $("running").hidden = true;
  $("outcome").hidden = false;
  $("outcome").textContent = text;
  showStatus(isGood ? "Imported." : "Not imported.");
  button.disabled = false;
}

/** Send the file; fetch tells nothing of an upload's progress, XMLHttpRequest does. */
function send(file) {
  const query = new URLSearchParams({ name: file.name, heldout: $("heldout").checked });
  if ($("labels").value) query.set("labels", $("labels").value);
  if ($("question").value.trim()) query.set("question", $("question").value.trim());
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", api(`imports?${query}`));
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => show("Sending the file", event.loaded / event.total));
    request.addEventListener("load", () => {
      if (request.status === 202) resolve(request.response);
      else reject(new Error(request.response?.detail ?? `the server answered ${request.status}`));
    });
    request.addEventListener("error", () => reject(new Error("the server was not reached; try again")));
    request.send(file);
  });
}

async function follow(number) {
  for (;;) {
    const state = (await call("GET", "imports")).find((one) => one.number === number);
    if (!state) throw new Error("the server was started anew before the import was done; import the file again");
    if (state.state === "done" || state.state === "failed") return end(state.message, state.state === "done");
    if (state.state === "reading") show("Reading the file", null);
    else show(`${count(state.num_done)} of ${count(state.num_rows)} rows stored`, state.num_done / (state.num_rows || 1));
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

$("import").addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true;
  $("outcome").hidden = true;
  showStatus("");
  try {
    const begun = await send($("file").files[0]);
    await follow(begun.number);
  } catch (error) {
    end(error.message, false);
  }
});
button.disabled = false;
