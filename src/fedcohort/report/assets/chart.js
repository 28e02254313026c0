// One chart on a page: view tabs, legend, filter, groups, smoothing, tooltip, zoom, downloads; redrawn when its size or the theme changes.
"use strict";
FC.charts = [];
FC.made = 0;
// Shared by all charts of a page: words to look for in the names of lines, whether to merge the lines of a selector, and
// how many points to smooth over.
FC.lines = { filter: "", group: false, smooth: 1 };

// The first word of a line's name: the selector, without the values of a sweep or the name of an experiment.
FC.groupOf = (label) => label.split(" ")[0];

// A view after the page's controls are applied: matching lines only, one per selector, smoothed.
FC.shaped = (view) => {
  if (!view.series) return view;
  const { filter, group, smooth } = FC.lines;
  const words = filter.toLowerCase().split(",").map((w) => w.trim()).filter(Boolean);
  let series = words.length ? view.series.filter((s) => words.some((w) => s.label.toLowerCase().includes(w))) : view.series;
  if (group) {
    const groups = new Map();
    for (const s of series) groups.set(FC.groupOf(s.label), [...(groups.get(FC.groupOf(s.label)) || []), s]);
    series = [...groups].map(([label, members]) => (members.length === 1 ? members[0] : FC.merged(label, members)));
  }
  if (smooth > 1) series = series.map((s) => ({ ...s, y: FC.smoothed(s.y, smooth), ...(s.lo ? { lo: FC.smoothed(s.lo, smooth), hi: FC.smoothed(s.hi, smooth) } : {}) }));
  return { ...view, series };
};

// The mean of several lines at the points of the first, up to the end of the shortest; its band is their range.
FC.merged = (label, members) => {
  const end = Math.min(...members.map((s) => s.x[s.x.length - 1]));
  const x = members[0].x.filter((v) => v <= end);
  const at = (s, v) => { let i = FC.nearest(s.x, v); if (s.x[i] > v && i > 0) i--; return s.y[i]; };
  const columns = x.map((v) => members.map((s) => at(s, v)).filter((y) => y !== null));
  const each = (f) => columns.map((c) => (c.length ? f(c) : null));
  return { ...members[0], label: `${label} (mean of ${members.length})`, x, y: each((c) => c.reduce((a, b) => a + b, 0) / c.length), lo: each((c) => Math.min(...c)), hi: each((c) => Math.max(...c)) };
};

// The trailing mean over `window` points, shorter at the beginning.
FC.smoothed = (values, window) => values.map((v, i) => {
  const known = values.slice(Math.max(0, i - window + 1), i + 1).filter((y) => y !== null);
  return v === null || !known.length ? null : known.reduce((a, b) => a + b, 0) / known.length;
});

FC.Chart = class {
  constructor(host, spec) {
    this.host = host;
    this.spec = spec;
    this.id = `c${FC.made++}`;
    this.view = 0;
    this.hidden = new Set();
    this.zoom = null;
    host.innerHTML = '<div class="controls"><div class="tabs"></div><div class="legend"></div><div class="shaping"></div></div><div class="plot" tabindex="0" role="group"></div>';
    this.tabs = host.querySelector(".tabs");
    this.legend = host.querySelector(".legend");
    this.shaping = host.querySelector(".shaping");
    this.plot = host.querySelector(".plot");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    FC.charts.push(this);
    this.controls();
    this.watch();
    new ResizeObserver(() => { if (Math.abs(this.plot.clientWidth - (this.width || 0)) > 1) this.render(); }).observe(this.plot);
  }

  get current() { return FC.shaped(this.spec.views[Math.min(this.view, this.spec.views.length - 1)]); }

  // Controls for many or long lines, the same in every chart of the page.
  shapers() {
    const view = this.spec.views[Math.min(this.view, this.spec.views.length - 1)];
    if (this.shaping.contains(document.activeElement)) return;
    const many = view.series && view.series.length > 2, long = view.series && view.series.some((s) => s.x.length > 20);
    const repeated = many && new Set(view.series.map((s) => FC.groupOf(s.label))).size < view.series.length;
    this.shaping.innerHTML = (many ? `<label>Only <input type="search" data-shape="filter" placeholder="names, by commas" value="${FC.escape(FC.lines.filter)}"></label>` : "")
      + (repeated ? `<label><input type="checkbox" data-shape="group"${FC.lines.group ? " checked" : ""}> one line per selector</label>` : "")
      + (long ? `<label>Smooth <select data-shape="smooth">${[1, 5, 15, 50].map((n) => `<option value="${n}"${n === FC.lines.smooth ? " selected" : ""}>${n === 1 ? "off" : `${n} points`}</option>`).join("")}</select></label>` : "");
    this.shaping.querySelectorAll("[data-shape]").forEach((field) => {
      field.oninput = () => {
        FC.lines[field.dataset.shape] = field.type === "checkbox" ? field.checked : field.dataset.shape === "smooth" ? +field.value : field.value;
        FC.charts.forEach((c) => { c.controls(); c.render(); });
      };
    });
  }

  update(spec) {
    const entries = (s) => JSON.stringify([s.views.map((v) => v.name), FC.kinds[s.kind].entries(s, s.views[0])]);
    const changed = entries(spec) !== entries(this.spec);
    this.spec = spec;
    if (changed) this.controls();
    this.render();
  }

  controls() {
    const { spec } = this;
    this.plot.setAttribute("aria-label", `${spec.title}. Arrow keys read its values, plus and minus zoom, Home shows the whole range.`);
    this.tabs.removeAttribute("role");
    if (spec.views.length > 8) {
      this.tabs.innerHTML = `<select aria-label="show">${spec.views.map((v, i) => `<option value="${i}">${FC.escape(v.name)}</option>`).join("")}</select>`;
      this.tabs.firstChild.value = String(this.view);
      this.tabs.firstChild.onchange = (e) => this.show(+e.target.value);
    } else {
      this.tabs.innerHTML = spec.views.length < 2 ? "" : spec.views.map((v, i) => `<button role="tab" aria-selected="${i === this.view}">${FC.escape(v.name)}</button>`).join("");
      if (spec.views.length > 1) FC.tabs(this.tabs, `${spec.title}: view`, (i) => this.show(i));
    }
    this.shapers();
    const entries = FC.kinds[spec.kind].entries(spec, this.current);
    this.legend.innerHTML = entries.length < 2 ? "" : entries.map((e) => {
      const swatch = e.part === undefined ? FC.swatch(`var(--s${e.color})`, e.dash) : `<span class="swatch" style="background:var(--ink);opacity:${[0.8, 0.35, 0.2][e.part]}"></span>`;
      return `<button type="button" aria-pressed="${!this.hidden.has(e.label)}" title="click: hide or show; double-click: only this one">${swatch}${FC.escape(e.label)}</button>`;
    }).join("");
    this.legend.querySelectorAll("button").forEach((b, i) => {
      b.onclick = () => this.toggle(entries[i].label);
      b.ondblclick = () => this.isolate(entries[i].label, entries);
    });
  }

  show(i) {
    this.view = i;
    this.zoom = this.cursor = null;
    this.controls();
    this.render();
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    const at = [...this.legend.children].indexOf(document.activeElement);
    this.controls();
    if (at >= 0) this.legend.children[at].focus();
    this.render();
  }

  isolate(label, entries) {
    this.hidden = new Set(entries.map((e) => e.label).filter((l) => l !== label));
    this.controls();
    this.render();
  }

  // SVG markup of the given size; `still` adds a legend inside the figure, for export.
  markup(width, height, still) {
    this.theme = FC.theme();
    const kind = FC.kinds[this.spec.kind];
    const entries = still ? kind.entries(this.spec, this.current).filter((e) => !this.hidden.has(e.label)) : [];
    const rows = still && entries.length > 1 ? legendRows(entries, this.theme, width) : { svg: "", height: 0 };
    this.width = width;
    this.height = height;
    this.drawn = kind.draw(this, this.spec, this.current);
    const label = FC.escape(`${this.spec.title}. ${this.spec.sentence || ""}`);
    const background = still ? `<rect width="${width}" height="${height + rows.height}" fill="${this.theme.surface}"/>` : "";
    const note = this.drawn.empty ? `<text x="${width / 2}" y="${height / 2}" text-anchor="middle">nothing to show</text>` : "";
    return { width, height: height + rows.height, svg: `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + rows.height}" viewBox="0 0 ${width} ${height + rows.height}" font-family="${FC.FONT.replace(/"/g, "'")}" font-size="12" fill="${this.theme.muted}" role="img" aria-label="${label}">${background}${rows.svg}<g transform="translate(0 ${rows.height})">${this.drawn.frame.axes}${this.drawn.body}${note}<g class="overlay"></g></g></svg>` };
  }

  render() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const kind = FC.kinds[this.spec.kind];
    const height = kind.height ? kind.height(this.spec, this.current, width) : width < 520 ? 280 : 340;
    this.plot.innerHTML = this.markup(width, height, false).svg;
    this.plot.append(this.tip);
    if (this.zoom) {
      const reset = document.createElement("button");
      reset.className = "reset";
      reset.textContent = "reset zoom";
      reset.onclick = () => { this.zoom = null; this.render(); };
      this.plot.append(reset);
    }
    this.host.dataset.state = this.drawn.empty ? "empty" : "drawn";
  }

  watch() {
    let start = null;
    const where = (e) => { const r = this.plot.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
    this.plot.addEventListener("pointerdown", (e) => {
      if (e.pointerType === "mouse" && e.button === 0 && this.drawn?.zoom && !e.target.closest("button")) start = where(e)[0];
    });
    this.plot.addEventListener("pointermove", (e) => {
      const [x, y] = where(e);
      this.hover(x, y);
      if (start !== null) this.overlay(`<rect x="${Math.min(start, x)}" y="${this.drawn.frame.box.top}" width="${Math.abs(x - start)}" height="${this.drawn.frame.box.bottom - this.drawn.frame.box.top}" fill="${this.theme.accent}" fill-opacity="0.15"/>`);
    });
    window.addEventListener("pointerup", (e) => {
      if (start === null) return;
      const [x] = where(e), from = start;
      start = null;
      if (Math.abs(x - from) > 8) {
        const { box } = this.drawn.frame, hold = (p) => Math.min(Math.max(p, box.left), box.right);
        const pair = [hold(from), hold(x)].map((p) => this.drawn.zoom.invert(p)).sort((a, b) => a - b);
        if (pair[1] > pair[0]) this.zoom = pair;
        this.render();
      }
    });
    this.plot.addEventListener("dblclick", () => { this.zoom = null; this.render(); });
    this.plot.addEventListener("keydown", (e) => this.key(e));
    this.plot.addEventListener("blur", () => { this.tip.hidden = true; this.overlay(""); });
    this.plot.addEventListener("pointerleave", () => { this.tip.hidden = true; this.overlay(""); });
  }

  // Keyboard access to what the pointer does: a cursor that reads values, zoom, and reset.
  key(e) {
    if (!this.drawn || e.target !== this.plot || e.ctrlKey || e.metaKey || e.altKey) return;
    const { box } = this.drawn.frame;
    const step = e.shiftKey ? 8 : 1, across = (box.right - box.left) / 60, down = (box.bottom - box.top) / 20;
    const moves = { ArrowLeft: [-across, 0], ArrowRight: [across, 0], ArrowUp: [0, -down], ArrowDown: [0, down] };
    const at = this.cursor || [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    if (moves[e.key]) {
      const hold = (v, lo, hi) => Math.min(Math.max(v, lo), hi);
      this.cursor = [hold(at[0] + step * moves[e.key][0], box.left, box.right - 1), hold(at[1] + step * moves[e.key][1], box.top, box.bottom - 1)];
      this.hover(...this.cursor);
    } else if ((e.key === "+" || e.key === "-") && this.drawn.zoom) {
      const [lo, hi] = [box.left, box.right].map((p) => this.drawn.zoom.invert(p)), x = this.drawn.zoom.invert(at[0]);
      const factor = e.key === "+" ? 0.5 : 2;
      this.zoom = [x - (x - lo) * factor, x + (hi - x) * factor];
      this.render();
    } else if (e.key === "Home" || e.key === "Escape") {
      this.zoom = this.cursor = null;
      this.render();
    } else return;
    e.preventDefault();
  }

  overlay(svg) {
    const layer = this.plot.querySelector(".overlay");
    if (layer) layer.innerHTML = svg;
  }

  hover(x, y) {
    const { box } = this.drawn.frame;
    const inside = x >= box.left - 6 && x <= box.right + 6 && y >= box.top - 6 && y <= box.bottom + 6;
    const found = inside ? this.drawn.hover(x, y) : null;
    this.tip.hidden = !found;
    if (!found) { this.overlay(""); return; }
    const line = found.y === undefined ? `<line x1="${found.x}" x2="${found.x}" y1="${box.top}" y2="${box.bottom}" stroke="${this.theme.muted}" stroke-opacity="0.5"/>` : "";
    this.overlay(line + found.marks.map(([cx, cy, c]) => `<circle cx="${cx}" cy="${cy}" r="4" fill="${c}" stroke="${this.theme.surface}" stroke-width="1.5"/>`).join(""));
    this.tip.innerHTML = found.html;
    const room = this.plot.clientWidth - this.tip.offsetWidth - 4;
    const left = found.x + 14 + this.tip.offsetWidth < this.plot.clientWidth ? found.x + 14 : found.x - 14 - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(4, Math.min(left, room))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y - 20, this.plot.clientHeight - this.tip.offsetHeight))}px`;
  }

  csv() { return FC.csv(FC.kinds[this.spec.kind].csv(this.spec)); }

  still(width = 760) {
    const kind = FC.kinds[this.spec.kind];
    const picture = this.markup(width, kind.height ? kind.height(this.spec, this.current, width) : 380, true);
    this.render();
    return picture;
  }
};

function legendRows(entries, theme, width) {
  let x = 14, y = 14, svg = "";
  for (const e of entries) {
    const w = FC.textWidth(e.label) + 45;
    if (x + w > width && x > 14) { x = 14; y += 18; }
    svg += e.part === undefined
      ? `<line x1="${x}" x2="${x + 22}" y1="${y - 4}" y2="${y - 4}" stroke="${theme.series[e.color]}" stroke-width="4" stroke-dasharray="${["", "7 4", "2 3"][(e.dash || 0) % 3]}"/>`
      : `<rect x="${x}" y="${y - 9}" width="22" height="11" rx="2" fill="${theme.ink}" fill-opacity="${[0.8, 0.35, 0.2][e.part]}"/>`;
    svg += `<text x="${x + 28}" y="${y}" fill="${theme.ink}">${FC.escape(e.label)}</text>`;
    x += w;
  }
  return { svg, height: y + 10 };
}

// A row of buttons with role "tab": arrow keys move between them, and the Tab key reaches the selected one.
FC.tabs = (row, label, choose) => {
  row.setAttribute("role", "tablist");
  row.setAttribute("aria-label", label);
  const tabs = [...row.querySelectorAll("[role=tab]")];
  tabs.forEach((tab, i) => {
    tab.type = "button";
    tab.tabIndex = tab.getAttribute("aria-selected") === "true" ? 0 : -1;
    tab.onclick = () => choose(i);
    tab.onkeydown = (e) => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tabs.length - 1 }[e.key];
      if (to === undefined) return;
      e.preventDefault();
      const next = (to + tabs.length) % tabs.length;
      choose(next);
      row.querySelectorAll("[role=tab]")[next].focus();
    };
  });
};

FC.redraw = () => FC.charts.forEach((c) => c.render());

// Light, dark or the system's choice; remembered if the browser allows it.
FC.themeButton = (button) => {
  const order = ["auto", "light", "dark"];
  const recall = () => { try { return localStorage.getItem("fedcohort-theme") || "auto"; } catch { return "auto"; } };
  const apply = (mode) => {
    if (mode === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = mode;
    button.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[mode];
    button.dataset.mode = mode;
    FC.redraw();
  };
  button.onclick = () => {
    const next = order[(order.indexOf(button.dataset.mode) + 1) % 3];
    try { localStorage.setItem("fedcohort-theme", next); } catch { /* a file opened from disk may have no storage */ }
    apply(next);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", FC.redraw);
  apply(document.documentElement.dataset.theme || recall());
};
