// An explanation as a table: scores, their parts with small bars, and what the shadows would have picked.
"use strict";
FC.whyTable = (why) => {
  const rows = [...why.picked, ...why.nearly];
  const scored = rows.some((r) => r.score !== null);
  const largest = Object.fromEntries(why.parts.map((p) => [p, Math.max(...rows.map((r) => Math.abs(r.parts[p] ?? 0)), 1e-300)]));
  const bar = (p, v) => {
    if (v === null || v === undefined) return "<td>–</td>";
    const width = Math.round((100 * Math.abs(v)) / largest[p]);
    return `<td class="part"><span>${FC.plain(v)}</span><i class="${v < 0 ? "minus" : ""}" style="width:${width}%"></i></td>`;
  };
  const meaning = (c) => ((why.meanings || {})[c] ? `<abbr title="${FC.escape(why.meanings[c])}">${FC.escape(c)}</abbr>` : FC.escape(c));
  const line = (r) => `<tr class="${r.picked ? "" : "out"}${why.client === r.client ? " asked" : ""}"><th scope="row">${FC.escape(r.name)}</th><td class="state">${r.picked ? "picked" : "not picked"}</td>`
    + (scored ? `<td>${r.place || "–"}</td><td>${FC.plain(r.score)}</td>` : "") + why.parts.map((p) => bar(p, r.parts[p])).join("") + "</tr>";
  const head = ["Client", "Picked", ...(scored ? ["Rank", "Score"] : []), ...why.parts].map((c, i) => `<th scope="col"${i === 1 ? ' class="state"' : ""}>${meaning(c)}</th>`).join("");
  const shadows = why.shadows.map((s) => `<li><b>${FC.escape(s.name)}</b> ${s.note ? FC.escape(s.note) : `would have picked ${s.picked.map(FC.escape).join(", ") || "no clients"}: ${s.same} of ${s.picked.length} the same`}</li>`).join("");
  const failures = Object.entries(why.failures || {}).map(([name, what]) => `<li><b>${FC.escape(name)}</b> ${FC.escape(what)}</li>`).join("");
  const notes = Object.entries(why.notes || {}).map(([k, v]) => `${FC.escape(k)} ${typeof v === "number" ? FC.plain(v) : FC.escape(v)}`).join(", ");
  const table = scored || why.parts.length
    ? `<div class="table" tabindex="0" role="region" aria-label="Scores of round ${why.round}"><table><thead><tr>${head}</tr></thead><tbody>${rows.map(line).join("")}</tbody></table></div>`
    : `<p>Picked: ${why.picked.map((r) => (why.client === r.client ? `<b>${FC.escape(r.name)}</b>` : FC.escape(r.name))).join(", ")}.</p>`;
  return `<p>${FC.escape(why.reason)}${why.threshold !== null && why.client === null ? ` The lowest score picked was ${FC.plain(why.threshold)}.` : ""}${why.rule ? ` ${FC.escape(why.rule)}` : scored ? "" : " No scores were recorded for this choice."}${notes ? ` <span class="note">${notes}</span>` : ""}</p>`
    + table + (failures ? `<p>Clients that returned no valid model:</p><ul class="shadows">${failures}</ul>` : "") + (shadows ? `<ul class="shadows">${shadows}</ul>` : "");
};
