"use strict";
(() => {
  const EVERY = 1000, RESTING = 5000; // milliseconds between two requests while a run is active, and otherwise
  const body = document.body, link = document.getElementById("link");
  const loaded = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve)); // all scripts have loaded
  const views = new Map(); // by figure: its element, the text of its spec, and the Vega view

  // Replace the content of an element; keep the focused link, and the scroll position of each region.
  const put = (id, html) => {
    const place = document.getElementById(id);
    if (!place) return;
    const focused = place.contains(document.activeElement) ? document.activeElement.closest("a, [role=region]") : null;
    const key = focused && (focused.getAttribute("href") || focused.getAttribute("aria-label"));
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

  // Unfold the runs of a comparison, and collect ticked runs. Both survive an update of the list.
  const unfolded = new Set(), ticked = new Set();
  const applyTicks = () => {
    for (const button of document.querySelectorAll("[data-fold]")) {
      button.hidden = false;
      button.setAttribute("aria-expanded", unfolded.has(button.dataset.fold));
    }
    for (const box of document.querySelectorAll("[data-tick]")) {
      box.hidden = false;
      box.checked = ticked.has(box.dataset.tick);
    }
    const line = document.querySelector(".ticked");
    if (!line) return;
    line.hidden = ticked.size < 2;
    document.getElementById("curves-of").href = `curves?names=${encodeURIComponent([...ticked].join("\n"))}`;
    document.getElementById("curves-of").textContent = `Show the curves of ${ticked.size} runs in one chart`;
  };
  document.addEventListener("click", ({ target }) => {
    const { fold, tick } = target.dataset || {};
    if (fold) unfolded.has(fold) ? unfolded.delete(fold) : unfolded.add(fold);
    if (tick) target.checked ? ticked.add(tick) : ticked.delete(tick);
    if (fold || tick) (applyFilter(), applyTicks());
  });

  const filter = document.getElementById("filter");
  const applyFilter = () => {
    if (!filter) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("tr[data-name]")];
    for (const row of rows) {
      const isFolded = !words.length && row.dataset.group && !unfolded.has(row.dataset.group);
      row.hidden = isFolded || !words.every((word) => row.dataset.name.toLowerCase().includes(word));
    }
    for (const section of document.querySelectorAll("section:has(.catalogue)")) section.hidden = !section.querySelector("tr[data-name]:not([hidden])");
    document.getElementById("shown").textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  };
  if (filter) {
    filter.closest(".filter").hidden = false;
    filter.addEventListener("input", applyFilter);
  }

  // Convert columns of equal length to rows for Vega.
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
      const first = views.size === 0 && document.getElementById("first");
      element.classList.toggle("wide", views.size === 0);
      element.querySelector(".hidden").textContent = ` of ${figure.title}`;
      first ? first.prepend(element) : document.getElementById("figures").append(element);
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
    chart.setAttribute("aria-label", figure.summary); // drawing replaces the label
  };

  let seen = "";
  const show = async (update) => {
    if (update.same) return;
    for (const [id, html] of Object.entries(update.parts || {})) put(id, html);
    const reading = document.getElementById("reading");
    if (reading) reading.textContent = update.share < 1 ? `Reading the records: ${Math.floor(100 * update.share)} %` : "";
    if (update.figures) {
      const config = JSON.parse(body.dataset.look);
      const options = { mode: "vega-lite", config, renderer: "svg", actions: false, ast: true, tooltip: { theme: "page" } };
      await loaded;
      for (const figure of update.figures) await draw(figure, options);
      for (const [id, { element, shown }] of views) {
        if (update.figures.some((figure) => figure.id === id)) continue;
        shown?.finalize();
        element.remove();
        views.delete(id);
      }
    }
    seen = update.version;
    applyFilter();
    applyTicks();
    ages();
  };

  const GONE = "this page no longer exists: open the address that the board printed";
  const fetchUpdate = async () => {
    const joined = body.dataset.live.includes("?") ? "&" : "?";
    let response;
    try {
      response = await fetch(`${body.dataset.live}${joined}have=${encodeURIComponent(seen)}`, { cache: "no-store" });
    } catch {
      throw new Error("the board does not respond; trying again");
    }
    if (!response.ok) throw new Error(response.status === 403 || response.status === 404 ? GONE : `the board returned status ${response.status}`);
    return response.json();
  };

  let timer, busy = false;
  const poll = async () => {
    if (document.hidden || busy) return;
    busy = true;
    let wait = EVERY;
    try {
      const update = await fetchUpdate();
      await show(update);
      link.textContent = update.moving ? "live" : "up to date";
      link.classList.remove("lost");
      wait = update.share < 1 ? 0 : update.moving ? EVERY : RESTING;
    } catch (error) {
      link.textContent = error.message;
      link.classList.add("lost");
    }
    busy = false;
    clearTimeout(timer);
    timer = setTimeout(poll, wait);
  };
  if (body.dataset.live) {
    poll();
    document.addEventListener("visibilitychange", poll);
  }

  ages();
  applyTicks();
  setInterval(ages, 1000);
})();
