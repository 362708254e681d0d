"use strict";
(() => {
  // Chart colors are CSS variables of the page, so a change of the color scheme requires no redraw.
  const { config, specs } = JSON.parse(document.getElementById("charts").textContent);
  const options = { mode: "vega-lite", config, renderer: "svg", actions: false, ast: true, tooltip: { theme: "page" } };
  for (const [id, spec] of Object.entries(specs)) {
    const place = document.getElementById(`chart-${id}`);
    vegaEmbed(place, spec, options).catch((error) => {
      place.textContent = `This chart could not be drawn (${error.message}); the data table below shows its values.`;
    });
  }
})();
