// The kinds of chart. Each draws into a frame and returns {frame, body, hover, zoom, empty}, and lists its numbers as CSV rows.
//   body   SVG markup inside the frame
//   hover  (px, py) -> {x, y, html, marks} or null
//   zoom   the x scale, if dragging may select a range
"use strict";
FC.kinds = {};

const dashes = ["", "7 4", "2 3"];

// A short piece of a series' line, for legends and tooltips.
FC.swatch = (color, dash) => `<svg class="swatch" width="22" height="10" aria-hidden="true"><line x1="0" x2="22" y1="5" y2="5" stroke="${color}" stroke-width="4" stroke-dasharray="${dashes[(dash || 0) % 3]}"/></svg>`;

// A frame with margins, x and y axes. `options` fixes the left, right or top margin.
FC.frame = (chart, x, y, options = {}) => {
  const { width, height, theme } = chart;
  const yUnit = FC.unit(y.format, Math.max(Math.abs(y.domain[0]), Math.abs(y.domain[1])));
  const xUnit = FC.unit(x.format, Math.max(Math.abs(x.domain[0]), Math.abs(x.domain[1])));
  const yTicks = y.ticks || FC.ticks(y.domain[0] / yUnit.factor, y.domain[1] / yUnit.factor,
    Math.max(3, Math.round(height / 60)), y.format === "integer").map((v) => v * yUnit.factor);
  const yStep = yTicks.length > 1 ? yTicks[1] - yTicks[0] : 1;
  const yText = y.names || yTicks.map((v) => FC.tickLabel(y.format, v, yUnit, yStep));
  const left = options.left ?? Math.ceil(Math.max(...yText.map((t) => FC.textWidth(t)), 18)) + 12;
  const box = { left, right: width - (options.right || 14), top: options.top || 26, bottom: height - 42 };
  const xTicks = FC.ticks(x.domain[0] / xUnit.factor, x.domain[1] / xUnit.factor,
    Math.max(2, Math.round((box.right - box.left) / 90)), x.format === "integer").map((v) => v * xUnit.factor);
  const xStep = xTicks.length > 1 ? xTicks[1] - xTicks[0] : 1;
  const sx = FC.scale(x.domain[0], x.domain[1], box.left, box.right);
  const sy = FC.scale(y.domain[0], y.domain[1], box.bottom, box.top);
  const name = (axis, unit) => FC.escape(unit.name && unit.name !== "" ? `${axis.label} (${unit.name})` : axis.label);
  let axes = "";
  yTicks.forEach((v, i) => {
    const p = sy(v).toFixed(1);
    if (!y.names) axes += `<line x1="${box.left}" x2="${box.right}" y1="${p}" y2="${p}" stroke="${theme.grid}"/>`;
    axes += `<text x="${box.left - 8}" y="${p}" dy="0.35em" text-anchor="end">${FC.escape(yText[i])}</text>`;
  });
  if (!x.hidden) {
    for (const v of xTicks) {
      const label = FC.tickLabel(x.format, v, xUnit, xStep);
      axes += `<text x="${sx(v).toFixed(1)}" y="${box.bottom + 18}" text-anchor="middle">${label}</text>`;
    }
    axes += `<line x1="${box.left}" x2="${box.right}" y1="${box.bottom}" y2="${box.bottom}" stroke="${theme.muted}" stroke-opacity="0.5"/>`;
  }
  axes += `<text x="${(box.left + box.right) / 2}" y="${height - 6}" text-anchor="middle">${name(x, xUnit)}</text>`;
  axes += `<text x="${Math.max(2, Math.min(box.left, 4))}" y="${Math.min(14, box.top - 10)}" text-anchor="start">${name(y, yUnit)}</text>`;
  return { box, sx, sy, axes, xUnit, yUnit };
};

// ---------------------------------------------------------------- lines with bands

const path = (xs, ys, sx, sy) => {
  let d = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null) { pen = "M"; continue; }
    d += `${pen}${sx(xs[i]).toFixed(1)} ${sy(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return d;
};

FC.kinds.lines = {
  entries: (spec, view) => view.series.map((s) => ({ label: s.label, color: s.color, dash: s.dash || 0 })),

  draw(chart, spec, view) {
    const shown = view.series.filter((s) => !chart.hidden.has(s.label));
    const theme = chart.theme;
    let xDomain = chart.zoom || FC.extent(shown.map((s) => s.x));
    if (!(xDomain[1] > xDomain[0])) xDomain = [xDomain[0] - 0.5, xDomain[0] + 0.5];
    const inside = (s, values) => values.filter((v, i) => s.x[i] >= xDomain[0] && s.x[i] <= xDomain[1]);
    const marks = (spec.marks || []).map((m) => m.y);
    let [lo, hi] = FC.extent([...shown.flatMap((s) => [inside(s, s.y), s.lo ? inside(s, s.lo) : [], s.hi ? inside(s, s.hi) : []]), marks]);
    if (!(hi > lo)) { lo -= Math.abs(lo) * 0.1 + 1e-6; hi += Math.abs(hi) * 0.1 + 1e-6; }
    const pad = (hi - lo) * 0.05;
    const y = spec.y;
    const yDomain = [y.min !== undefined ? Math.max(y.min, lo - pad) : lo - pad, y.max !== undefined ? Math.min(y.max, hi + pad) : hi + pad];
    // Every line has its name at its end; on a phone, names take at most a third of the width and long ones are cut.
    const direct = shown.length <= 14;
    const room = chart.width > 620 ? 190 : Math.round(chart.width * 0.32);
    const right = direct ? Math.min(room, Math.max(...shown.map((s) => FC.textWidth(s.label, 600)), 0) + 18) : 14;
    const frame = FC.frame(chart, { ...view.x, domain: xDomain }, { ...y, domain: yDomain }, { right });
    const { box, sx, sy } = frame;
    const clip = `${chart.id}-clip`;
    let body = `<clipPath id="${clip}"><rect x="${box.left}" y="${box.top - 2}" width="${box.right - box.left + 1}" height="${box.bottom - box.top + 4}"/></clipPath><g clip-path="url(#${clip})">`;
    for (const s of shown) {
      if (!s.lo) continue;
      const keep = s.x.map((_, i) => i).filter((i) => s.lo[i] !== null && s.hi[i] !== null);
      const forth = keep.map((i) => `${sx(s.x[i]).toFixed(1)} ${sy(s.hi[i]).toFixed(1)}`);
      const back = keep.map((i) => `${sx(s.x[i]).toFixed(1)} ${sy(s.lo[i]).toFixed(1)}`).reverse();
      if (keep.length > 1) body += `<path d="M${forth.concat(back).join("L")}Z" fill="${theme.series[s.color]}" fill-opacity="0.13"/>`;
    }
    for (const s of shown) {
      const color = theme.series[s.color];
      const finite = s.y.filter((v) => v !== null).length;
      if (finite === 1) {
        const i = s.y.findIndex((v) => v !== null);
        body += `<circle cx="${sx(s.x[i]).toFixed(1)}" cy="${sy(s.y[i]).toFixed(1)}" r="3.5" fill="${color}"/>`;
      } else {
        body += `<path d="${path(s.x, s.y, sx, sy)}" fill="none" stroke="${color}" stroke-width="1.8" stroke-linejoin="round" stroke-dasharray="${dashes[(s.dash || 0) % 3]}"/>`;
      }
    }
    body += "</g>";
    for (const m of spec.marks || []) {
      if (m.y < yDomain[0] || m.y > yDomain[1]) continue;
      const p = sy(m.y).toFixed(1);
      body += `<line x1="${box.left}" x2="${box.right}" y1="${p}" y2="${p}" stroke="${theme.ink}" stroke-dasharray="1 4" stroke-opacity="0.7"/>`;
      body += `<text x="${box.left + 6}" y="${+p - 5}" fill="${theme.ink}">${FC.escape(m.label)}</text>`;
    }
    if (direct) body += endLabels(shown, frame, theme, right - 12);
    const hover = (px) => {
      const at = sx.invert(px);
      const found = shown.filter((s) => s.x.length).map((s) => ({ s, i: FC.nearest(s.x, at) }))
        .filter(({ s, i }) => s.y[i] !== null && Math.abs(sx(s.x[i]) - px) < 40).sort((a, b) => b.s.y[b.i] - a.s.y[a.i]);
      if (!found.length) return null;
      const lead = found[0];
      const html = `<b>${FC.escape(view.x.label)} ${FC.format(view.x.format, lead.s.x[lead.i])}</b>` + found.slice(0, 14).map(({ s, i }) => {
        const spread = s.lo && s.hi[i] !== null ? ` <i>${FC.format(y.format, s.lo[i])} to ${FC.format(y.format, s.hi[i])}</i>` : "";
        return `<div>${FC.swatch(theme.series[s.color], s.dash)}${FC.escape(s.label)} <b>${FC.format(y.format, s.y[i])}</b>${spread}</div>`;
      }).join("");
      return { x: sx(lead.s.x[lead.i]), html, marks: found.map(({ s, i }) => [sx(s.x[i]), sy(s.y[i]), theme.series[s.color]]) };
    };
    return { frame, body, hover, zoom: sx, empty: !shown.some((s) => s.y.some((v) => v !== null)) };
  },

  csv(spec) {
    const rows = [["view", "series", "x", spec.y.label, "low", "high"]];
    for (const view of spec.views) for (const s of view.series) {
      s.x.forEach((x, i) => rows.push([view.name, s.label, x, s.y[i], s.lo ? s.lo[i] : null, s.hi ? s.hi[i] : null]));
    }
    return rows;
  },
};

// Labels at the right end of each line, pushed apart so that none overlap.
function endLabels(series, { box, sx, sy }, theme, room) {
  const ends = series.map((s) => {
    let i = s.x.length - 1;
    while (i >= 0 && (s.y[i] === null || sx(s.x[i]) > box.right + 0.5)) i--;
    return i < 0 ? null : { s, x: sx(s.x[i]), y: Math.min(Math.max(sy(s.y[i]), box.top), box.bottom) };
  }).filter(Boolean).sort((a, b) => a.y - b.y);
  const gap = 14;
  const want = ends.map((e) => e.y);
  for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + gap);
  const over = ends.length ? ends[ends.length - 1].y - (box.bottom + 4) : 0;
  if (over > 0) for (let i = ends.length - 1, limit = box.bottom + 4; i >= 0; i--, limit = ends[i + 1].y - gap) ends[i].y = Math.min(ends[i].y, limit);
  return ends.map((e, i) => {
    const color = theme.series[e.s.color];
    const lead = Math.abs(e.y - want[i]) > 3 || e.x < box.right - 4
      ? `<path d="M${e.x.toFixed(1)} ${want[i].toFixed(1)}L${box.right + 8} ${e.y.toFixed(1)}" stroke="${color}" stroke-opacity="0.4" fill="none"/>` : "";
    return `${lead}<text x="${box.right + 10}" y="${e.y.toFixed(1)}" dy="0.35em" fill="${color}" font-weight="600">${FC.escape(clipText(e.s.label, room, 600))}</text>`;
  }).join("");
}

// ---------------------------------------------------------------- heat map

FC.kinds.heat = {
  entries: () => [],

  height: (spec, view, width) => Math.min(560, Math.max(200, 80 + view.rows * (view.rows <= 30 ? 22 : width < 520 ? 2.6 : 3.6))),

  draw(chart, spec, view) {
    const { theme } = chart;
    const cells = FC.bytes(view.cells);
    const max = view.max || 1;
    const x = { ...view.x, domain: chart.zoom || [view.x0, view.x0 + view.cols * view.xstep] };
    const step = view.ystep || 1;
    const y = view.names
      ? { ...spec.y, domain: [view.rows, 0], ticks: view.names.map((_, i) => i + 0.5), names: view.names }
      : { ...spec.y, domain: [view.rows * step, 0] };
    const frame = FC.frame(chart, x, y, {});
    const { box, sx, sy } = frame;
    const canvas = document.createElement("canvas");
    canvas.width = view.cols;
    canvas.height = view.rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(view.cols, view.rows);
    const colours = Array.from({ length: 256 }, (_, b) => FC.ramp(theme.heat, b / 255));
    cells.forEach((b, i) => image.data.set([...colours[b], 255], 4 * i));
    context.putImageData(image, 0, 0);
    const clip = `${chart.id}-clip`;
    const x0 = sx(view.x0), x1 = sx(view.x0 + view.cols * view.xstep);
    let body = `<clipPath id="${clip}"><rect x="${box.left}" y="${box.top}" width="${box.right - box.left}" height="${box.bottom - box.top}"/></clipPath>`;
    body += `<g clip-path="url(#${clip})"><image x="${x0}" y="${box.top}" width="${x1 - x0}" height="${box.bottom - box.top}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${canvas.toDataURL()}"/></g>`;
    body += legend(chart, box, spec.value, max);
    const hover = (px, py) => {
      const col = Math.floor((sx.invert(px) - view.x0) / view.xstep);
      const row = Math.floor(sy.invert(py) / (view.names ? 1 : step));
      if (col < 0 || row < 0 || col >= view.cols || row >= view.rows) return null;
      const value = (cells[row * view.cols + col] / 255) * max;
      const from = view.x0 + col * view.xstep, to = from + view.xstep - 1;
      const where = view.xstep > 1 ? `${view.x.label} ${from} to ${to}` : `${view.xitem || view.x.label} ${view.xnames ? view.xnames[col] : from}`;
      const item = view.names ? view.names[row] : step > 1 ? `${spec.y.item} ${row * step} to ${row * step + step - 1}` : `${spec.y.item} ${row}`;
      return { x: px, y: py, html: `<b>${FC.escape(item)}</b><div>${FC.escape(where)}</div><div>${FC.escape(spec.value.label)} <b>${FC.format(spec.value.format, value)}</b></div>`, marks: [] };
    };
    return { frame, body, hover, zoom: sx, empty: !cells.some((b) => b > 0) };
  },

  csv(spec) {
    const rows = [["view", spec.y.item, spec.views[0].xitem || spec.views[0].x.label, spec.value.label]];
    for (const view of spec.views) {
      const cells = FC.bytes(view.cells);
      for (let r = 0; r < view.rows; r++) for (let c = 0; c < view.cols; c++) {
        const value = (cells[r * view.cols + c] / 255) * view.max;
        if (value) rows.push([view.name, view.names ? view.names[r] : r * (view.ystep || 1), view.xnames ? view.xnames[c] : view.x0 + c * view.xstep, +value.toPrecision(4)]);
      }
    }
    return rows;
  },
};

// The colour bar of a heat map, in the top right corner.
function legend(chart, box, value, max) {
  const { theme } = chart;
  const width = 90, x = box.right - width, id = `${chart.id}-ramp`;
  const text = FC.format(value.format, max);
  const name = chart.width > 520 ? `<text x="${x - FC.textWidth("0") - 12}" y="14" text-anchor="end">${FC.escape(value.label)}</text>` : "";
  return `<linearGradient id="${id}">${theme.heat.map((c, i) => `<stop offset="${i / (theme.heat.length - 1)}" stop-color="${c}"/>`).join("")}</linearGradient>`
    + `${name}<text x="${x - 6}" y="14" text-anchor="end">0</text><rect x="${x}" y="5" width="${width - FC.textWidth(text) - 6}" height="10" rx="2" fill="url(#${id})"/>`
    + `<text x="${box.right}" y="14" text-anchor="end">${text}</text>`;
}

// ---------------------------------------------------------------- stacked bars, one row per selector

FC.kinds.bars = {
  entries: (spec) => spec.parts.map((label, i) => ({ label, part: i })),

  height: (spec, view) => 74 + 30 * view.rows.length,

  draw(chart, spec, view) {
    const { theme, width } = chart;
    const use = spec.parts.map((p) => !chart.hidden.has(p));
    const total = (row) => row.parts.reduce((sum, v, i) => sum + (use[i] ? v : 0), 0);
    const max = Math.max(...view.rows.map(total), 1e-12);
    const left = Math.min(width * 0.36, Math.max(...view.rows.map((r) => FC.textWidth(r.label))) + 14);
    const rows = view.rows;
    const y = { label: "", domain: [rows.length, 0], ticks: [], names: [] };
    const frame = FC.frame(chart, { ...view.x, domain: [0, max] }, y, { left, right: 74, top: 8 });
    const { box, sx, sy } = frame;
    let body = "";
    rows.forEach((row, i) => {
      const top = sy(i) + 5, height = Math.max(4, sy(i + 1) - sy(i) - 10), middle = (top + height / 2).toFixed(1);
      let x = box.left;
      row.parts.forEach((v, j) => {
        if (!use[j]) return;
        const w = sx(v) - sx(0);
        body += `<rect x="${x.toFixed(1)}" y="${top.toFixed(1)}" width="${Math.max(0, w).toFixed(1)}" height="${height.toFixed(1)}" fill="${theme.series[row.color]}" fill-opacity="${[0.9, 0.4, 0.2][j]}"/>`;
        x += w;
      });
      body += `<text x="${box.left - 8}" y="${middle}" dy="0.35em" text-anchor="end" fill="${theme.ink}">${FC.escape(clipText(row.label, left - 12))}</text>`;
      body += `<text x="${(x + 6).toFixed(1)}" y="${middle}" dy="0.35em" fill="${theme.ink}">${FC.format(view.x.format, total(row))}</text>`;
    });
    const hover = (px, py) => {
      const row = rows[Math.floor(sy.invert(py))];
      if (!row) return null;
      return { x: px, y: py, marks: [], html: `<b>${FC.escape(row.label)}</b>` + spec.parts.map((p, j) => `<div>${FC.escape(p)} <b>${FC.format(view.x.format, row.parts[j])}</b></div>`).join("") };
    };
    return { frame, body, hover, empty: !rows.some((r) => total(r) > 0) };
  },

  csv: (spec) => [["view", "series", ...spec.parts], ...spec.views.flatMap((v) => v.rows.map((r) => [v.name, r.label, ...r.parts]))],
};

function clipText(text, width, weight = 400) {
  let t = text;
  while (t.length > 3 && FC.textWidth(t, weight) > width) t = `${t.slice(0, -2)}…`;
  return t;
}

// ---------------------------------------------------------------- points on a map, coloured by category

FC.kinds.points = {
  entries: (spec) => spec.categories.map((label, i) => ({ label, color: spec.colors[i] })),

  height: (spec, view, width) => Math.min(480, Math.max(300, width * 0.62)),

  draw(chart, spec, view) {
    const { theme } = chart;
    const pad = ([lo, hi]) => { const p = (hi - lo || 1) * 0.06; return [lo - p, hi + p]; };
    const frame = FC.frame(chart, { ...view.x, domain: pad(FC.extent([view.px])), hidden: true }, { ...spec.y, domain: pad(FC.extent([view.py])), ticks: [], names: [] }, { left: 14 });
    const { sx, sy } = frame;
    const shown = view.px.map((_, i) => i).filter((i) => !chart.hidden.has(spec.categories[view.category[i]]));
    let body = "";
    for (const i of shown) {
      const x = sx(view.px[i]).toFixed(1), y = sy(view.py[i]).toFixed(1);
      body += `<circle cx="${x}" cy="${y}" r="${view.px.length > 400 ? 3 : view.px.length > 100 ? 5 : 8}" fill="${theme.series[spec.colors[view.category[i]]]}" fill-opacity="0.85" stroke="${theme.surface}"/>`;
      // Nobody can tell ten colours apart, so dots carry a short name if there is room.
      if (view.px.length <= 100) body += `<text x="${x}" y="${y}" dy="0.35em" text-anchor="middle" font-size="9" font-weight="600" fill="${theme.surface}">${FC.escape(spec.short[view.category[i]])}</text>`;
    }
    const hover = (px, py) => {
      let best = null, distance = 400;
      for (const i of shown) {
        const d = (sx(view.px[i]) - px) ** 2 + (sy(view.py[i]) - py) ** 2;
        if (d < distance) { distance = d; best = i; }
      }
      return best === null ? null : { x: sx(view.px[best]), y: sy(view.py[best]), marks: [[sx(view.px[best]), sy(view.py[best]), theme.ink]], html: `<b>client ${FC.escape(view.names[best])}</b><div>${FC.escape(spec.categories[view.category[best]])}</div>` };
    };
    return { frame, body, hover, empty: !shown.length };
  },

  csv: (spec) => [["view", "client", "x", "y", "category"], ...spec.views.flatMap((v) => v.px.map((x, i) => [v.name, v.names[i], x, v.py[i], spec.categories[v.category[i]]]))],
};

// ---------------------------------------------------------------- ranked values with intervals

FC.kinds.intervals = {
  entries: () => [],

  draw(chart, spec, view) {
    const { theme } = chart;
    let [lo, hi] = FC.extent([view.lo, view.hi]);
    if (!(hi > lo)) hi = lo + 1;
    const pad = (hi - lo) * 0.05;
    const y = { ...spec.y, domain: [lo - pad, hi + pad] };
    const frame = FC.frame(chart, { ...view.x, format: "integer", domain: chart.zoom || [0.5, view.mid.length + 0.5] }, y, {});
    const { box, sx, sy } = frame;
    const clip = `${chart.id}-clip`;
    const color = theme.series[1];
    let body = `<clipPath id="${clip}"><rect x="${box.left}" y="${box.top - 4}" width="${box.right - box.left}" height="${box.bottom - box.top + 8}"/></clipPath><g clip-path="url(#${clip})">`;
    const size = Math.min(5, Math.max(1.6, Math.abs(sx(1) - sx(0)) * 0.32));
    view.mid.forEach((mid, i) => {
      const x = sx(i + 1).toFixed(1);
      body += `<line x1="${x}" x2="${x}" y1="${sy(view.lo[i]).toFixed(1)}" y2="${sy(view.hi[i]).toFixed(1)}" stroke="${color}" stroke-opacity="0.45" stroke-width="${Math.max(1, size * 0.5)}"/>`;
      body += `<circle cx="${x}" cy="${sy(mid).toFixed(1)}" r="${size.toFixed(1)}" fill="${color}"/>`;
    });
    body += "</g>";
    const hover = (px) => {
      const i = Math.round(sx.invert(px)) - 1;
      if (i < 0 || i >= view.mid.length) return null;
      return { x: sx(i + 1), marks: [[sx(i + 1), sy(view.mid[i]), color]], html: `<b>client ${FC.escape(view.names[i])}</b><div>rank ${i + 1}</div><div>${FC.escape(spec.y.label)} <b>${FC.format(spec.y.format, view.mid[i])}</b> <i>${FC.format(spec.y.format, view.lo[i])} to ${FC.format(spec.y.format, view.hi[i])}</i></div>${view.note ? `<div>${FC.escape(view.note[i])}</div>` : ""}` };
    };
    return { frame, body, hover, zoom: sx, empty: !view.mid.length };
  },

  csv: (spec) => [["view", "rank", "client", spec.y.label, "low", "high"], ...spec.views.flatMap((v) => v.mid.map((m, i) => [v.name, i + 1, v.names[i], m, v.lo[i], v.hi[i]]))],
};

// ---------------------------------------------------------------- mean ranks with a critical difference

FC.kinds.ranks = {
  entries: () => [],

  height: (spec, view) => 104 + 26 * view.labels.length + 12 * view.alike.length,

  draw(chart, spec, view) {
    const { theme, width } = chart;
    const count = view.labels.length;
    const left = Math.min(width * 0.36, Math.max(...view.labels.map((l) => FC.textWidth(l, 600))) + 16);
    const rows = count + 0.5 * view.alike.length;
    const frame = FC.frame(chart, { ...view.x, domain: [1, count] }, { label: "", domain: [rows, 0], ticks: [], names: [] }, { left: left + 8, right: 44, top: 44 });
    const { box, sx, sy } = frame;
    let body = "";
    const wide = Math.min(1 + view.difference, count);
    const ruler = `<path d="M${sx(1).toFixed(1)} 22v8M${sx(1).toFixed(1)} 26H${sx(wide).toFixed(1)}${wide < 1 + view.difference ? "" : "m0 -4v8"}" stroke="${theme.ink}" stroke-width="1.5" fill="none"/>`;
    body += `${ruler}<text x="${sx(1).toFixed(1)}" y="15" fill="${theme.ink}">critical difference ${FC.plain(view.difference)}</text>`;
    view.labels.forEach((label, i) => {
      const y = sy(i + 0.5).toFixed(1), x = sx(view.ranks[i]).toFixed(1), color = theme.series[view.colors[i]];
      body += `<line x1="${box.left}" x2="${x}" y1="${y}" y2="${y}" stroke="${theme.grid}"/><circle cx="${x}" cy="${y}" r="6" fill="${color}"/>`;
      body += `<text x="${box.left - 10}" y="${y}" dy="0.35em" text-anchor="end" fill="${theme.ink}" font-weight="600">${FC.escape(clipText(label, left - 8, 600))}</text>`;
      body += `<text x="${(+x + 11).toFixed(1)}" y="${y}" dy="0.35em" fill="${theme.muted}">${view.ranks[i].toFixed(2)}</text>`;
    });
    view.alike.forEach(([from, to], i) => {
      const y = sy(count + 0.5 * i + 0.25).toFixed(1);
      body += `<line x1="${(sx(view.ranks[from]) - 7).toFixed(1)}" x2="${(sx(view.ranks[to]) + 7).toFixed(1)}" y1="${y}" y2="${y}" stroke="${theme.ink}" stroke-width="5" stroke-linecap="round"/>`;
    });
    const hover = (px, py) => {
      const i = Math.floor(sy.invert(py));
      if (i < 0 || i >= count) return null;
      const others = view.labels.map((label, j) => (j === i ? "" : `<div>against ${FC.escape(label)} p <b>${view.p[i][j] < 0.001 ? "&lt;0.001" : view.p[i][j].toFixed(3)}</b></div>`)).join("");
      return { x: sx(view.ranks[i]), y: sy(i + 0.5), marks: [], html: `<b>${FC.escape(view.labels[i])}</b><div>mean rank <b>${view.ranks[i].toFixed(2)}</b></div>${others}` };
    };
    return { frame, body, hover, empty: !count };
  },

  csv: (spec) => [["view", "selector", "mean rank", "critical difference", "against", "p"], ...spec.views.flatMap((v) => v.labels.flatMap((label, i) => v.labels.filter((_, j) => j !== i).map((other) => [v.name, label, v.ranks[i], v.difference, other, v.p[i][v.labels.indexOf(other)]])))],
};
