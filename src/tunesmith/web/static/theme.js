// Sets the chosen colour scheme, else that of the system, before the first paint.
"use strict";
(function () {
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
    if (!button) return;
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
      document.dispatchEvent(new CustomEvent("theme"));
    });
  });
})();
