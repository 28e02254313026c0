// Scales, number formats and small helpers shared by every chart. No dependencies, no network.
"use strict";
const FC = {};

// Like printable() of fedcohort.core.text: control and invisible characters are written out; then HTML is escaped.
const controls = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const writtenOut = (c) => { const code = c.codePointAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`; };
FC.escape = (text) => String(text).replace(controls, (c) => (c === "\n" || c === "\t" ? c : writtenOut(c)))
  .replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

// Colours come from CSS custom properties, so the page and its charts always agree on the theme.
FC.theme = () => {
  const css = getComputedStyle(document.documentElement);
  const read = (name) => css.getPropertyValue(name).trim();
  const series = [];
  for (let i = 0; read(`--s${i}`); i++) series.push(read(`--s${i}`));
  return { ink: read("--ink"), muted: read("--muted"), grid: read("--grid"), surface: read("--surface"),
    accent: read("--accent"), heat: [read("--heat0"), read("--heat1"), read("--heat2")], series };
};

// ---------------------------------------------------------------- numbers

const trim = (text) => text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

FC.plain = (v) => {
  if (v === null || v === undefined || !Number.isFinite(v)) return "–";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return v.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(v).toLocaleString("en-US");
  return trim(v.toPrecision(size >= 100 ? 4 : 3));
};

const UNITS = {
  seconds: [[86400 * 3, 86400, "days"], [7200, 3600, "hours"], [180, 60, "min"], [0, 1, "s"]],
  bytes: [[2e12, 1e12, "TB"], [2e9, 1e9, "GB"], [2e6, 1e6, "MB"], [2e3, 1e3, "kB"], [0, 1, "B"]],
};

// The unit for the numbers of an axis: {factor, name}.
FC.unit = (kind, max) => {
  for (const [from, factor, name] of UNITS[kind] || []) if (max >= from) return { factor, name };
  return { factor: 1, name: "" };
};

FC.format = (kind, v, unit) => {
  if (v === null || v === undefined || !Number.isFinite(v)) return "–";
  if (kind === "percent") return `${(100 * v).toFixed(1)}%`;
  if (kind === "integer") return Math.round(v).toLocaleString("en-US");
  if (UNITS[kind]) {
    const u = unit || FC.unit(kind, Math.abs(v));
    return `${FC.plain(v / u.factor)} ${u.name}`;
  }
  return FC.plain(v);
};

// Round tick positions covering [lo, hi], about `count` of them.
FC.ticks = (lo, hi, count, whole) => {
  if (lo > hi) [lo, hi] = [hi, lo];
  if (lo === hi) return [lo];
  const rough = (hi - lo) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const out = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i++) out.push(+(i * step).toPrecision(12));
  return out;
};

FC.tickLabel = (kind, v, unit, step) => {
  const digits = (s) => Math.max(0, Math.min(6, -Math.floor(Math.log10(s) + 1e-9)));
  if (kind === "percent") return `${(100 * v).toFixed(digits(100 * step))}%`;
  const scaled = v / unit.factor, scaledStep = step / unit.factor;
  if (Math.abs(scaled) >= 1000) return Math.round(scaled).toLocaleString("en-US");
  return scaled.toFixed(digits(scaledStep));
};

FC.scale = (d0, d1, r0, r1) => {
  const k = d1 !== d0 ? (r1 - r0) / (d1 - d0) : 0;
  const f = (v) => r0 + (v - d0) * k;
  f.invert = (p) => (k ? d0 + (p - r0) / k : d0);
  return f;
};

FC.extent = (arrays) => {
  let lo = Infinity, hi = -Infinity;
  for (const a of arrays) for (const v of a) if (v !== null && v < lo) lo = v;
  for (const a of arrays) for (const v of a) if (v !== null && v > hi) hi = v;
  return lo <= hi ? [lo, hi] : [0, 1];
};

// Index of the entry of ascending `xs` nearest to `x`.
FC.nearest = (xs, x) => {
  let lo = 0, hi = xs.length - 1;
  while (hi - lo > 1) {
    const mid = (lo + hi) >> 1;
    if (xs[mid] <= x) lo = mid; else hi = mid;
  }
  return Math.abs(xs[lo] - x) <= Math.abs(xs[hi] - x) ? lo : hi;
};

// Bytes of a base64 string.
FC.bytes = (cells) => Uint8Array.from(atob(cells), (c) => c.charCodeAt(0));

FC.textWidth = (() => {
  let context = null;
  return (text, weight = 400) => {
    context = context || document.createElement("canvas").getContext("2d");
    context.font = `${weight} 12px ${FC.FONT}`;
    return context.measureText(text).width;
  };
})();
FC.FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";

// "#rrggbb" colours mixed along a three-stop ramp, t in [0, 1].
FC.ramp = (stops, t) => {
  const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const a = parse(stops[i]), b = parse(stops[i + 1]);
  return a.map((v, j) => Math.round(v + (b[j] - v) * (at - i)));
};

// ---------------------------------------------------------------- downloads

FC.download = (name, mime, content) => {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: mime }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};

FC.csv = (rows) => rows.map((row) => row.map((cell) => {
  const text = cell === null || cell === undefined ? "" : String(cell);
  return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}).join(",")).join("\n") + "\n";

// Rasterise an SVG string; resolves to a canvas.
FC.raster = (svg, width, height, zoom) => new Promise((resolve, reject) => {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(width * zoom);
    canvas.height = Math.round(height * zoom);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    resolve(canvas);
  };
  image.onerror = () => reject(new Error("the figure could not be drawn"));
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
});
