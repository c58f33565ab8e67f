// Every page: the colour scheme, set before the first paint (hence no module), and the logout button.
"use strict";
{
  const address = (path) => new URL(`../${path}`, document.currentScript.src).href;
  const [session, login] = [address("api/v1/session"), address("login")];
  const root = document.documentElement;
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  try {
    const chosen = localStorage.getItem("tunesmith.theme");
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  } catch {
    // Storage is disabled: the system's scheme is used.
  }

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const nameButton = () => (button.textContent = isDark() ? "Light mode" : "Dark mode");
    button.hidden = false;
    nameButton();
    systemDark.addEventListener("change", nameButton);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("tunesmith.theme", root.dataset.theme);
      } catch {
        // Storage is disabled: the choice is lost with the page.
      }
      nameButton();
    });

    const logout = document.getElementById("logout");
    logout?.addEventListener("click", async () => {
      try {
        await fetch(session, { method: "DELETE", signal: AbortSignal.timeout(15_000) });
      } finally {
        location.assign(login);
      }
    });
    logout?.removeAttribute("disabled");
  });
}
