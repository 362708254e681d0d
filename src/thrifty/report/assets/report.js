"use strict";
(() => {
  // Colours in the charts are CSS variables of the page, so a change of scheme needs no new drawing.
  const { config, specs } = JSON.parse(document.getElementById("charts").textContent);
  const options = { mode: "vega-lite", config, renderer: "svg", actions: false, ast: true, tooltip: { theme: "page" } };
  for (const [id, spec] of Object.entries(specs)) {
    const place = document.getElementById(`chart-${id}`);
    vegaEmbed(place, spec, options).catch((error) => {
      place.textContent = `This chart could not be drawn (${error.message}); the data table below holds its values.`;
    });
  }

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
