// Draws every view of every figure and leaves the results in the page as JSON, for the exporting program.
"use strict";
(async () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("data"), options = read("options"), out = [];
  const stage = document.getElementById("stage");
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  for (const spec of figures) {
    const host = stage.appendChild(document.createElement("div"));
    const chart = new FC.Chart(host, spec);
    out.push({ file: spec.file, kind: "csv", content: chart.csv() });
    for (let i = 0; i < spec.views.length; i++) {
      chart.view = i;
      const still = chart.still(options.width);
      const file = spec.views.length > 1 ? `${spec.file}-${slug(spec.views[i].name)}` : spec.file;
      out.push({ file, kind: "svg", content: still.svg });
      if (options.png) {
        const canvas = await FC.raster(still.svg, still.width, still.height, options.png);
        out.push({ file, kind: "png", content: canvas.toDataURL("image/png").split(",")[1] });
      }
    }
    host.remove();
  }
  document.getElementById("result").textContent = JSON.stringify(out);
})();
