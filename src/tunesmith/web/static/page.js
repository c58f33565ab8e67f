// The logout button of every page.
import { call } from "./api.js";

const leave = document.getElementById("leave");

leave?.addEventListener("click", async () => {
  try {
    await call("DELETE", "session");
  } finally {
    location.assign("/login");
  }
});
leave?.removeAttribute("disabled");
