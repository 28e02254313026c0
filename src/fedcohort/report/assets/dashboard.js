// The dashboard page: a list of experiments and sessions, and the chosen one in detail, updated by server-sent events.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const STATES = { running: "good", finished: "done", interrupted: "warn", killed: "bad", failed: "bad", unreadable: "bad", diverged: "bad", stopped: "done", waiting: "warn" };
  let source = null, chosen = decodeURIComponent(location.hash.slice(1)), detail = null, setting = 0, charts = new Map(), shape = "", run = null, round = null;
  let experiments = [], secondId = "", second = null, fetchedAt = 0; // a second experiment to compare with

  const pill = (state) => `<span class="pill ${STATES[state] || ""}">${FC.escape(state === "killed" ? "stopped (killed)" : state)}</span>`;
  const duration = (s) => (s === null || s === undefined || !Number.isFinite(s) ? "" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  const percent = (v) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(1)}%`);
  const share = (d) => (d.total ? Math.min(100, (100 * d.done) / d.total) : d.state === "finished" ? 100 : 0);

  const rate = (d) => (d.rate ? (d.rate >= 1 ? `${FC.plain(d.rate)} rounds/s` : `${FC.plain(60 * d.rate)} rounds/min`) : "");
  const progress = (d) => [d.total ? `${d.done.toLocaleString("en-US")} of ${d.total.toLocaleString("en-US")} rounds` : `${d.done} rounds`,
    d.state === "running" ? rate(d) : "", d.left ? `${duration(d.left)} left` : ""].filter(Boolean).join(" · ");

  function connect() {
    if (source) source.close();
    source = new EventSource(`/events?item=${encodeURIComponent(chosen)}`);
    source.onopen = () => { $("link").textContent = "live"; $("link").className = "pill good"; };
    source.onerror = () => { $("link").textContent = "connection lost, retrying"; $("link").className = "pill bad"; };
    source.addEventListener("overview", (e) => overview(JSON.parse(e.data)));
    source.addEventListener("detail", (e) => { detail = JSON.parse(e.data); show(); fetchSecond(); });
  }

  function choose(id) {
    chosen = id;
    detail = null;
    setting = 0;
    run = round = null;
    history.replaceState(null, "", `#${encodeURIComponent(id)}`);
    connect();
  }

  // Replace the content of an element and restore the keyboard focus, which is found by its data-key.
  function put(element, html) {
    if (element.dataset.shown === html) return;
    const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    element.innerHTML = element.dataset.shown = html;
    if (key !== undefined) [...element.querySelectorAll("[data-key]")].find((e) => e.dataset.key === key)?.focus();
  }

  function overview(data) {
    $("root").textContent = `Following ${data.root}${data.note ? `. ${data.note}` : ""}`;
    if (!data.items.length) {
      put($("items"), "");
      $("detail").innerHTML = `<section class="card"><h2>Nothing here yet</h2><p>Waiting for an experiment or a session's journal in ${FC.escape(data.root)}. It will appear here.</p></section>`;
      shape = "";
      return;
    }
    put($("items"), data.items.map((d) => `<button type="button" data-key="${FC.escape(d.id)}" data-id="${FC.escape(d.id)}" aria-current="${d.id === chosen}"><b>${FC.escape(d.id)}</b>${pill(d.state)}<span class="track"><i style="width:${share(d)}%"></i></span><span class="note">${FC.escape(progress(d))}</span></button>`).join(""));
    $("items").querySelectorAll("button").forEach((b) => { b.onclick = () => choose(b.dataset.id); });
    experiments = data.items.filter((d) => d.kind === "experiment").map((d) => d.id);
    if (!data.items.some((d) => d.id === chosen)) choose(data.items[0].id);
    compareChoice();
  }

  // The choice of an experiment to compare with.
  function compareChoice() {
    const others = experiments.includes(chosen) ? experiments.filter((id) => id !== chosen) : [];
    if (!others.includes(secondId)) { secondId = ""; second = null; }
    if (!$("compare") || $("compare").contains(document.activeElement)) return;
    put($("compare"), others.length ? `<label>Compare with <select id="second"><option value="">none</option>${others.map((id) => `<option value="${FC.escape(id)}"${id === secondId ? " selected" : ""}>${FC.escape(id)}</option>`).join("")}</select></label>` : "");
    if ($("second")) $("second").onchange = (e) => { secondId = e.target.value; second = null; fetchedAt = 0; show(); fetchSecond(); };
  }

  async function fetchSecond() {
    if (!secondId || Date.now() - fetchedAt < 2000) return;
    fetchedAt = Date.now();
    const id = secondId, answer = await fetch(`/api/detail?item=${encodeURIComponent(id)}`);
    if (!answer.ok || id !== secondId) return;
    second = await answer.json();
    show();
  }

  // A figure of lines, with the lines of the second experiment, whose name is added to theirs.
  function overlaid(f, section) {
    const added = second && f.kind === "lines" && (second.sections.find((s) => s.name === section.name) || second.sections[0])?.figures.find((g) => g.name === f.name);
    if (!added) return f;
    const named = (s) => ({ ...s, label: `${s.label} (${second.id})`, dash: (s.dash || 0) + 1 });
    return { ...f, views: f.views.map((v) => ({ ...v, series: [...v.series, ...(added.views.find((w) => w.name === v.name)?.series || []).map(named)] })) };
  }

  // The frame is rebuilt only when its parts change; otherwise numbers and charts are updated in place.
  function show() {
    const section = detail.sections[Math.min(setting, detail.sections.length - 1)];
    const figures = section ? section.figures : [];
    const parts = JSON.stringify([detail.id, detail.sections.map((s) => s.name), setting, figures.map((f) => f.name), (detail.blocks || []).map((b) => b.name)]);
    if (parts !== shape) {
      shape = parts;
      FC.charts = FC.charts.filter((c) => ![...charts.values()].includes(c));
      charts = new Map();
      const cards = figures.map((f) => `<figure class="card"><figcaption><h2>${FC.escape(f.title)}</h2><p data-sentence="${f.name}"></p></figcaption><div class="downloads"><button type="button" data-csv="${f.name}" aria-label="Save ${FC.escape(f.title)} as CSV">CSV</button></div><div class="chart" data-figure="${f.name}"></div></figure>`);
      $("detail").innerHTML = `<section class="card" id="head"></section><div class="controls" id="compare"></div><section class="card" id="away" hidden></section><div id="settings" class="settings"></div>${cards[0] || ""}`
        + (section && section.board ? '<section class="card"><h2>Leaderboard</h2><div id="board"></div></section>' : "")
        + `<section class="card"><h2 id="cohort-title">Current cohort</h2><div class="controls"><label>Round <input id="round" class="round" type="number" min="0" step="1" placeholder="latest"></label><button type="button" id="before">Previous</button><button type="button" id="after">Next</button><button type="button" id="latest">Latest</button></div><div id="cohort"></div><div id="why" aria-live="polite"></div><div id="stragglers"></div></section>`
        + `<section class="card"><h2>Runs</h2><div id="runs"></div></section>`
        + (detail.blocks || []).map((b) => `<section class="card"><h2>${FC.escape(b.title)}</h2><div data-block="${FC.escape(b.name)}"></div>${b.name === "clients" ? '<div class="controls"><label>History of <input id="who" type="text" placeholder="a client\'s name"></label><button type="button" id="history">Show</button></div><div id="past" aria-live="polite"></div>' : ""}</section>`).join("")
        + cards.slice(1).join("");
      if (detail.sections.length > 1) {
        $("settings").innerHTML = detail.sections.map((s, i) => `<button role="tab" aria-selected="${i === setting}">${FC.escape(s.name)}</button>`).join("");
        FC.tabs($("settings"), "Settings", (i) => { setting = i; run = round = null; show(); });
      }
      $("round").onchange = () => open($("round").value === "" ? null : +$("round").value);
      $("before").onclick = () => open((round ?? newest()) - 1);
      $("after").onclick = () => open((round ?? newest()) + 1);
      $("latest").onclick = () => open(null);
      if ($("history")) $("history").onclick = past;
      if ($("who")) $("who").onkeydown = (e) => { if (e.key === "Enter") past(); };
      $("detail").querySelectorAll("[data-csv]").forEach((b) => { b.onclick = () => FC.download(`${b.dataset.csv}.csv`, "text/csv", charts.get(b.dataset.csv).csv()); });
    }
    head();
    if (section && section.board) put($("board"), section.board);
    runs(section ? section.name : null);
    for (const b of detail.blocks || []) put($("detail").querySelector(`[data-block="${b.name}"]`), b.html);
    compareChoice();
    for (const plain of figures) {
      const f = overlaid(plain, section);
      $("detail").querySelector(`[data-sentence="${f.name}"]`).textContent = f.sentence;
      const host = $("detail").querySelector(`[data-figure="${f.name}"]`);
      if (charts.has(f.name)) charts.get(f.name).update(f); else charts.set(f.name, new FC.Chart(host, f));
    }
  }

  const clock = (s) => `${new Date(1000 * s).toLocaleString()} (${duration(Math.max(0, Date.now() / 1000 - s))})`;
  const message = (d) => (d.message ? `<p class="warning">${d.since ? `Waiting since ${FC.escape(clock(d.since))}: ` : ""}${FC.escape(d.message)}</p>` : "");
  const online = (d) => (typeof d.online === "number" ? `<p class="note">${d.online} clients online, ${d.offline_count} offline</p>` : "");

  function head() {
    $("head").innerHTML = `<h2>${FC.escape(detail.id)} ${pill(detail.state)}</h2><span class="track big"><i style="width:${share(detail)}%"></i></span><p class="note">${FC.escape(progress(detail))}</p>${online(detail)}${message(detail)}${detail.warnings.map((w) => `<p class="warning">${FC.escape(w)}</p>`).join("")}`;
    const away = detail.offline || [];
    $("away").hidden = !away.length;
    const more = detail.offline_count > away.length ? `<p class="note">The last ${away.length} of ${detail.offline_count} to go offline.</p>` : "";
    put($("away"), away.length ? `<h2>Offline</h2>${more}<div class="table tall" tabindex="0" role="region" aria-label="Offline clients" data-key="away"><table><thead><tr><th scope="col">Client</th><th scope="col">Offline since</th></tr></thead><tbody>${away.map((c) => `<tr><th scope="row">${FC.escape(c.client)}</th><td>${FC.escape(clock(c.since))}</td></tr>`).join("")}</tbody></table></div>` : "");
  }
  setInterval(() => { if (detail && $("head")) head(); }, 20000); // how long clients have been offline changes with time

  const current = () => detail.table.find((r) => r.id === run);
  const newest = () => current()?.round ?? 0;
  const title = (line) => (line.seed === null ? line.label : line.id);

  function runs(name) {
    const lines = detail.table.filter((r) => name === null || r.setting === name);
    if (!lines.some((r) => r.id === run)) run = (lines.find((r) => r.state === "running") || lines[0] || {}).id;
    const heads = ["Run", "State", "Rounds", "Accuracy", "Best", "Simulated time"].map((h) => `<th scope="col">${h}</th>`).join("");
    put($("runs"), lines.length ? `<div class="table tall" tabindex="0" role="region" aria-label="Runs"><table><thead><tr>${heads}</tr></thead><tbody>${lines.map((r) => `<tr data-run="${FC.escape(r.id)}" class="pick"><th scope="row"><button type="button" class="link" data-key="${FC.escape(r.id)}" aria-pressed="${r.id === run}">${FC.escape(title(r))}</button></th><td>${pill(r.state)}</td><td data-round>${r.round === null ? "–" : r.round + 1}</td><td>${percent(r.accuracy)}</td><td>${percent(r.best)}</td><td>${duration(r.clock) || "–"}</td></tr>`).join("")}</tbody></table></div>` : "<p>No run has finished a round yet.</p>");
    $("runs").querySelectorAll("[data-run]").forEach((row) => { row.onclick = () => { run = row.dataset.run; $("why").innerHTML = ""; round = null; runs(name); }; });
    const line = current();
    if (line) cohort(line);
  }

  // The cohort of the newest round, which is kept up to date, or of the round that was opened.
  function cohort(line) {
    if (round === null) members(line, line.round, line.cohort, "Current cohort");
    put($("stragglers"), line.stragglers.length ? `<h3>Stragglers</h3><div class="table" tabindex="0" role="region" aria-label="Stragglers"><table><thead><tr>${["Client", "Asked", "No model", "Mean time", "Compared with others"].map((h) => `<th scope="col">${h}</th>`).join("")}</tr></thead><tbody>${line.stragglers.map((s) => `<tr><th scope="row">${FC.escape(s.client)}</th><td>${s.asked}</td><td>${s.trouble}</td><td>${s.seconds === null ? "–" : FC.format("seconds", s.seconds)}</td><td>${s.slow === null ? "–" : `${s.slow.toFixed(1)}×`}</td></tr>`).join("")}</tbody></table></div>` : "");
  }

  function members(line, at, clients, otherwise) {
    $("cohort-title").textContent = at === null ? otherwise : `Cohort of round ${at}, ${title(line)}`;
    $("round").max = newest();
    $("before").disabled = at === null || at <= 0;
    $("after").disabled = at === null || at >= newest();
    $("latest").disabled = round === null;
    put($("cohort"), clients.length ? `<p class="note">Choose a client to see why it was picked.</p><div class="chips">${clients.map((c) => `<button type="button" data-key="${FC.escape(c.client)}" data-client="${FC.escape(c.client)}" class="${FC.escape(c.status)}">${FC.escape(c.client)} <span>${FC.escape(c.status)}${c.seconds ? ` ${duration(c.seconds) || ""}` : ""}</span></button>`).join("")}</div>${reasons(clients)}` : "<p>No client has been picked yet.</p>");
    $("cohort").querySelectorAll("[data-client]").forEach((b) => { b.onclick = () => why(line, at, b.dataset.client); });
  }

  const reasons = (clients) => {
    const failed = clients.filter((c) => c.reason);
    return failed.length ? `<ul class="shadows">${failed.map((c) => `<li><b>${FC.escape(c.client)}</b> ${FC.escape(c.status)}: ${FC.escape(c.reason)}</li>`).join("")}</ul>` : "";
  };

  // One client's part in every round.
  async function past() {
    const client = $("who").value.trim();
    if (!client) return;
    const answer = await (await fetch(`/api/history?${new URLSearchParams({ item: detail.id, client })}`)).json();
    $("past").innerHTML = answer.error
      ? `<p class="warning">${FC.escape(answer.error)}</p>`
      : `<p>${FC.escape(client)} was picked in ${answer.rounds.filter((r) => r.picked).length} of ${answer.rounds.length} rounds.</p><div class="table tall" tabindex="0" role="region" aria-label="History of ${FC.escape(client)}"><table><thead><tr><th scope="col">Round</th><th scope="col">Picked</th><th scope="col" class="wrap">What happened, or why it was not picked</th></tr></thead><tbody>${answer.rounds.map((r) => `<tr class="${r.picked ? "" : "out"}"><th scope="row">${r.round}</th><td>${r.picked ? "yes" : "no"}</td><td class="wrap">${FC.escape(r.what)}</td></tr>`).join("")}</tbody></table></div>`;
  }

  async function open(number) {
    const line = current();
    if (!line || line.round === null) return;
    round = number === null || number >= line.round ? null : Math.max(0, number);
    $("round").value = round === null ? "" : round;
    $("why").innerHTML = "";
    if (round === null) return cohort(line);
    const answer = await ask("cohort", line, round);
    if (answer.error) { $("why").innerHTML = `<p class="warning">${FC.escape(answer.error)}</p>`; return; }
    members(line, answer.round, answer.cohort, "");
    await why(line, answer.round);
  }

  const ask = async (what, line, at, client) => {
    const query = new URLSearchParams({ item: detail.id, run: line.id, round: at, ...(client === undefined ? {} : { client }) });
    return (await fetch(`/api/${what}?${query}`)).json();
  };

  async function why(line, at, client) {
    const answer = await ask("explain", line, at, client);
    $("why").innerHTML = answer.error
      ? `<p class="warning">${FC.escape(answer.error)}</p>`
      : `<h3>Why ${client === undefined ? "these clients" : `client ${FC.escape(client)}`} in round ${at}?</h3>${FC.whyTable(answer)}`;
  }

  FC.themeButton($("theme"));
  connect();
})();
