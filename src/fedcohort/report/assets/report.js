// The report page: draws figures when they come into view, switches settings, shows explanations, saves numbers.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = new Map();

  const draw = (host) => {
    if (!charts.has(host)) charts.set(host, new FC.Chart(host, data.figures[host.dataset.figure]));
    return charts.get(host);
  };

  // Figures are drawn when they come near the screen, so that a report of sixty runs opens quickly.
  const watcher = new IntersectionObserver((entries) => {
    for (const e of entries) if (e.isIntersecting) { watcher.unobserve(e.target); draw(e.target); }
  }, { rootMargin: "600px" });
  document.querySelectorAll(".chart").forEach((host) => watcher.observe(host));
  FC.drawAll = () => document.querySelectorAll(".pane:not([hidden]) .chart").forEach(draw);

  document.querySelectorAll("[data-save]").forEach((button) => {
    button.onclick = async () => {
      const host = button.closest("figure").querySelector(".chart");
      const chart = draw(host), name = chart.spec.file;
      if (button.dataset.save === "csv") return FC.download(`${name}.csv`, "text/csv", chart.csv());
      const still = chart.still();
      if (button.dataset.save === "svg") return FC.download(`${name}.svg`, "image/svg+xml", still.svg);
      const canvas = await FC.raster(still.svg, still.width, still.height, 2);
      canvas.toBlob((blob) => FC.download(`${name}.png`, "image/png", blob));
    };
  });

  document.querySelectorAll("[data-table]").forEach((button) => {
    button.onclick = () => {
      const rows = [...button.closest("section").querySelectorAll("tr")];
      FC.download(button.dataset.table, "text/csv", FC.csv(rows.map((r) => [...r.children].map((c) => c.textContent.trim()))));
    };
  });

  const panes = [...document.querySelectorAll(".pane")];
  const row = document.querySelector(".settings");
  const choose = (number) => {
    row.querySelectorAll("[role=tab]").forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === number));
      tab.tabIndex = i === number ? 0 : -1;
    });
    panes.forEach((pane, i) => { pane.hidden = i !== number; });
    FC.redraw();
  };
  if (row) FC.tabs(row, "Settings", choose);

  document.querySelectorAll("[data-copy]").forEach((button) => {
    const label = button.textContent;
    button.onclick = async () => {
      const source = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch { // some browsers have no clipboard for a file opened from disk: select the text instead
        const folded = source.closest("details");
        if (folded) folded.open = true;
        getSelection().selectAllChildren(source);
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = label; }, 2500);
    };
  });

  document.querySelectorAll(".why").forEach((section) => {
    const groups = data.explanations[section.dataset.why];
    const [selector, round, table] = ["selector", "round", "table"].map((r) => section.querySelector(`[data-role=${r}]`));
    selector.innerHTML = groups.map((g, i) => `<option value="${i}">${FC.escape(g.label)} (seed ${g.seed})</option>`).join("");
    const show = () => { table.innerHTML = FC.whyTable(groups[+selector.value].rounds[+round.value]); };
    const choose = () => {
      const { rounds } = groups[+selector.value];
      round.innerHTML = rounds.map((w, i) => `<option value="${i}">${w.round}</option>`).join("");
      round.value = String(rounds.length - 1);
      show();
    };
    selector.onchange = choose;
    round.onchange = show;
    // Start with a selector that has something to explain.
    const first = groups.findIndex((g) => g.rounds.some((w) => w.parts.length));
    selector.value = String(Math.max(0, first));
    choose();
  });

  const theme = document.getElementById("theme");
  if (theme) FC.themeButton(theme);
  window.addEventListener("beforeprint", FC.drawAll);
})();
