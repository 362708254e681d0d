"use strict";
(() => {
  const EVERY = 1000, RESTING = 5000; // milliseconds between two questions while something moves, and while nothing does
  const body = document.body, link = document.getElementById("link");
  const loaded = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve)); // all scripts are here
  const views = new Map(); // by figure: its element, the text of its spec, and what Vega shows there

  // What has changed replaces what was there; focus returns to the same link, or stays on the region that scrolls.
  const put = (id, html) => {
    const place = document.getElementById(id);
    if (!place) return;
    const held = place.contains(document.activeElement) ? document.activeElement.closest("a, [role=region]") : null;
    const key = held && (held.getAttribute("href") || held.getAttribute("aria-label"));
    const offsets = [...place.querySelectorAll("[role=region]")].map((region) => region.scrollTop);
    place.innerHTML = html;
    [...place.querySelectorAll("[role=region]")].forEach((region, index) => (region.scrollTop = offsets[index] || 0));
    if (!key) return;
    const again = [...place.querySelectorAll("a, [role=region]")].find(
      (each) => (each.getAttribute("href") || each.getAttribute("aria-label")) === key,
    );
    if (again) again.focus({ preventScroll: true });
  };

  const ages = () => {
    const now = Date.now() / 1000;
    for (const time of document.querySelectorAll("time[data-since]")) {
      const seconds = Math.max(0, Math.round(now - time.dataset.since));
      const [size, unit] = seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : seconds < 172800 ? [3600, "h"] : [86400, "d"];
      const exact = time.title || time.textContent;
      time.title = exact;
      time.textContent = `${Math.floor(seconds / size)} ${unit} ago`;
    }
  };

  const filter = document.getElementById("filter");
  const sift = () => {
    if (!filter) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("tr[data-name]")];
    for (const row of rows) row.hidden = !words.every((word) => row.dataset.name.toLowerCase().includes(word));
    for (const section of document.querySelectorAll("section:has(.catalogue)")) section.hidden = !section.querySelector("tr[data-name]:not([hidden])");
    document.getElementById("shown").textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  };
  if (filter) {
    filter.closest(".filter").hidden = false;
    filter.addEventListener("input", sift);
  }

  // Columns of equal length as the rows that Vega takes.
  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]]))) : [];
  };

  const draw = async (figure, options) => {
    const data = Object.fromEntries(Object.entries(figure.data).map(([name, columns]) => [name, rowsOf(columns)]));
    let known = views.get(figure.id);
    if (!known) {
      const element = document.getElementById("figure").content.cloneNode(true).firstElementChild;
      element.id = `figure-${figure.id}`;
      element.classList.toggle("wide", figure.id === "loss");
      element.querySelector(".hidden").textContent = ` of ${figure.title}`;
      document.getElementById("figures").append(element);
      views.set(figure.id, (known = { element }));
    }
    const { element } = known, chart = element.querySelector(".chart");
    if (known.caption !== figure.caption) element.querySelector("figcaption").innerHTML = known.caption = figure.caption;
    if (known.numbers !== figure.numbers) {
      element.querySelector(".numbers").id = `numbers-${figure.id}`;
      put(`numbers-${figure.id}`, (known.numbers = figure.numbers));
    }
    const shape = JSON.stringify(figure.spec);
    if (known.shape !== shape) {
      known.shown?.finalize();
      chart.style.minHeight = `${figure.spec.height}px`;
      known.shown = await vegaEmbed(chart, { ...figure.spec, datasets: data }, options);
      known.shape = shape;
    } else {
      for (const [name, rows] of Object.entries(data)) known.shown.view.data(name, rows);
      await known.shown.view.runAsync();
    }
    chart.setAttribute("aria-label", figure.summary); // drawing gives it one of its own
  };

  let seen = "";
  const show = async (told) => {
    if (told.same) return;
    for (const [id, html] of Object.entries(told.parts || {})) put(id, html);
    const reading = document.getElementById("reading");
    if (reading) reading.textContent = told.share < 1 ? `Reading the records: ${Math.floor(100 * told.share)} %` : "";
    if (told.figures) {
      const config = JSON.parse(body.dataset.look);
      const options = { mode: "vega-lite", config, renderer: "svg", actions: false, ast: true, tooltip: { theme: "page" } };
      await loaded;
      for (const figure of told.figures) await draw(figure, options);
      for (const [id, { element, shown }] of views) {
        if (told.figures.some((figure) => figure.id === id)) continue;
        shown?.finalize();
        element.remove();
        views.delete(id);
      }
    }
    seen = told.version;
    sift();
    ages();
  };

  const GONE = "this page is no longer there: open the address that the board printed";
  const fetched = async () => {
    const joined = body.dataset.live.includes("?") ? "&" : "?";
    let answer;
    try {
      answer = await fetch(`${body.dataset.live}${joined}have=${encodeURIComponent(seen)}`, { cache: "no-store" });
    } catch {
      throw new Error("the board does not answer; trying again");
    }
    if (!answer.ok) throw new Error(answer.status === 403 || answer.status === 404 ? GONE : `the board answered ${answer.status}`);
    return answer.json();
  };

  let timer, asking = false;
  const ask = async () => {
    if (document.hidden || asking) return;
    asking = true;
    let wait = EVERY;
    try {
      const told = await fetched();
      await show(told);
      link.textContent = told.moving ? "live" : "up to date";
      link.classList.remove("lost");
      wait = told.share < 1 ? 0 : told.moving ? EVERY : RESTING;
    } catch (error) {
      link.textContent = error.message;
      link.classList.add("lost");
    }
    asking = false;
    clearTimeout(timer);
    timer = setTimeout(ask, wait);
  };
  if (body.dataset.live) {
    ask();
    document.addEventListener("visibilitychange", ask);
  }

  ages();
  setInterval(ages, 1000);
})();
