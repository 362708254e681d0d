"use strict";
(() => {
  // Add a copy button after each copyable text.
  const copy = async (pre, button) => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(pre);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  };
  for (const pre of document.querySelectorAll(".copyable pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", () => copy(pre, button));
    pre.after(button);
  }
})();
