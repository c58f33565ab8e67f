// What every page has: the button that ends the session.
import { call } from "./api.js";

document.getElementById("leave")?.addEventListener("click", async () => {
  try {
    await call("DELETE", "session");
  } finally {
    location.assign("/login");
  }
});
