"use strict";
(() => {
  let D = JSON.parse(document.getElementById("data").textContent);
  const state = { split: D.split, personal: D.first === "personal", client: "", seed: null, hidden: new Set() };
  const byId = (id) => document.getElementById(id);
  const touch = matchMedia("(pointer: coarse)").matches;

  // Helpers. Names enter the page as text, never as HTML; Plotly interprets some HTML, so names are escaped for it.
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const clipped = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (method) => css(`--m${method % 8}`);
  const faded = (hex, share) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${share})`;
  const element = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (value !== 0 && (size < 0.001 || size >= 1e5)) return value.toPrecision(3);
    return size >= 100 ? value.toFixed(1) : value.toFixed(3);
  };
  const metric = () => (state.personal ? "personal_" : "") + D.metric;
  const words = (name) => name.replace("personal_", "personal ").replace(/_/g, " ");
  const smaller = () => D.smaller.includes(D.metric);

  const widths = new WeakMap();
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target._fullLayout && widths.get(target) !== target.clientWidth) Plotly.Plots.resize(target);
      widths.set(target, target.clientWidth);
    }
  });

  // Cards: a heading and a plot, found by key so that redrawing reuses them.
  const card = (parent, key, title, small) => {
    let made = [...parent.children].find((child) => child.dataset.key === key);
    if (!made) {
      made = element("div", undefined, { class: "card", "data-key": key });
      made.append(element("h3"), element("div", undefined, { class: "plot" }));
      parent.append(made);
      resized.observe(made.lastChild);
    }
    const head = made.firstChild;
    head.hidden = !title;
    head.replaceChildren(title, ...(small ? [" ", element("small", small)] : []));
    made.dataset.drawn = "1";
    return made.lastChild;
  };
  // Plots are painted once all cards of a section exist, since only then is the width of each known.
  let queue = [];
  const flush = (parent) => {
    for (const child of [...parent.children]) {
      if (!child.dataset.drawn) {
        resized.unobserve(child.lastChild);
        Plotly.purge(child.lastChild);
        child.remove();
      }
      delete child.dataset.drawn;
    }
    queue.forEach((paint) => paint());
    queue = [];
  };
  const draw = (...what) => queue.push(() => paint(...what));
  const paint = (plot, traces, layout, click) => {
    const axis = { gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true, fixedrange: touch };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
      margin: { l: 48, r: 12, t: 10, b: 44 }, height: 270, dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), family: getComputedStyle(document.body).fontFamily }, align: "left", namelength: -1 },
      ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    };
    Plotly.react(plot, traces, base, { displayModeBar: false });
    widths.set(plot, plot.clientWidth);
    plot.removeAllListeners("plotly_click");
    if (click) plot.on("plotly_click", (event) => click(event.points[0]));
  };

  const rounds = (all) => ({ title: { text: "round" }, ...(Math.max(...all.slice(-1), 0) <= 8 ? { dtick: 1 } : {}) });

  // Controls.
  const choice = (label, options, chosen, pick) => {
    const box = element("div", undefined, { class: "choice", role: "group", "aria-label": label });
    const set = element("span", undefined, { class: "set" });
    for (const [value, text] of options) {
      const button = element("button", text, { type: "button", "aria-pressed": String(value === chosen) });
      button.addEventListener("click", () => { pick(value); drawAll(); });
      set.append(button);
    }
    box.append(label, set);
    return box;
  };
  const selection = (label, id, options, chosen, pick) => {
    const box = element("label", label), select = element("select", undefined, { id });
    for (const [value, text] of options) select.append(new Option(text, value, false, value === chosen));
    select.addEventListener("change", () => { pick(select.value); drawAll(); });
    box.append(select);
    return box;
  };
  const controls = () => {
    const parts = [], seeds = [...new Set(D.clients.map((one) => one.seed))];
    if (!seeds.includes(state.seed)) state.seed = seeds.length ? seeds[0] : null;
    const names = [...new Set(D.clients.filter((one) => one.seed === state.seed).flatMap((one) => one.names))];
    if (!names.includes(state.client)) state.client = "";
    if (D.splits.length > 1) parts.push(choice("Data", D.splits.map((name) => [name, name]), state.split, (value) => { state.split = value; }));
    if (D.personal) parts.push(choice("Model", [[false, "global"], [true, "personal"]], state.personal, (value) => { state.personal = value; }));
    if (seeds.length > 1) parts.push(selection("Clients of seed", "seed", seeds.map((seed) => [String(seed), String(seed)]), String(state.seed), (value) => { state.seed = Number(value); }));
    if (names.length) parts.push(selection("Client", "client", [["", "all clients"], ...names.map((name) => [name, clipped(name, 40)])], state.client, (value) => { state.client = value; }));
    const held = document.activeElement && document.activeElement.id;
    byId("controls").replaceChildren(...parts);
    if (held && byId("controls").querySelector(`#${CSS.escape(held)}`)) byId(held).focus();
  };
  const isolate = (name) => {
    state.client = state.client === name ? "" : name;
    if (byId("client")) byId("client").value = state.client;
    clients(); strip(); weights();
  };

  // Curves with bands over seeds.
  const legend = () => {
    byId("legend").replaceChildren(...D.methods.map((method, i) => {
      const button = element("button", undefined, { type: "button", "aria-pressed": String(!state.hidden.has(i)), title: "show or hide" });
      const line = element("i");
      line.style.borderTopColor = colour(i);
      button.append(line, method.name + (method.seeds.length > 1 ? ` (${method.seeds.length} seeds)` : ""));
      button.addEventListener("click", () => {
        state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
        legend(); curves();
      });
      return button;
    }));
  };
  const curves = () => {
    for (const name of D.metrics) {
      const shown = (state.personal ? "personal_" : "") + name;
      for (const [kind, label] of [["mean", "average client"], ["worst", "worst client"]]) {
        const traces = [];
        D.methods.forEach((method, i) => {
          const found = method.curves[`${state.split}.${shown}.${kind}`];
          if (!found || state.hidden.has(i)) return;
          if (method.seeds.length > 1) {
            traces.push({ x: [...found.rounds, ...found.rounds.slice().reverse()], y: [...found.high, ...found.low.slice().reverse()], fill: "toself", fillcolor: faded(colour(i), 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip", name: "band" });
          }
          traces.push({ x: found.rounds, y: found.mean, mode: found.rounds.length > 1 ? "lines" : "markers", line: { color: colour(i), width: 2.2 }, marker: { color: colour(i) }, name: escaped(method.name), hovertemplate: `${escaped(method.name)}<br>round %{x}: <b>%{y:.4~g}</b><extra></extra>` });
        });
        const plot = card(byId("curves"), `${name} ${kind}`, `${words(shown)}, ${label}`, `${state.split} data`);
        draw(plot, traces, { xaxis: rounds(traces.length ? traces[traces.length - 1].x : []), yaxis: { rangemode: D.smaller.includes(name) ? "tozero" : "normal" }, hovermode: "closest" });
      }
    }
    flush(byId("curves"));
  };

  // Clients: one line per client; one of them can be highlighted.
  const shownClients = () => D.clients.filter((one) => one.seed === state.seed);
  const last = (line) => { for (let i = line.length - 1; i >= 0; i--) if (line[i] !== null) return line[i]; return null; };
  const worstOf = (values) => {
    let found = -1;
    values.forEach((line, i) => {
      const value = last(line), best = found < 0 ? null : last(values[found]);
      if (value !== null && (best === null || (smaller() ? value > best : value < best))) found = i;
    });
    return found;
  };
  const clients = () => {
    byId("about-clients").textContent = `The ${words(metric())} of each client on its ${state.split} data; the worst client is highlighted. Hover over a line to see the client's name, click to isolate the client, click again to show all. ${D.sampled.join(" ")}`;
    const all = shownClients().flatMap((one) => (one.values[`${state.split}.${metric()}`] || []).flat()).filter((value) => value !== null);
    const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity), room = (high - low) * 0.05 || 0.05;
    for (const one of shownClients()) {
      const values = one.values[`${state.split}.${metric()}`] || [], worst = worstOf(values), paint = colour(one.method);
      const alone = one.names.indexOf(state.client);
      const traces = values.map((line, i) => {
        const strong = state.client ? i === alone : i === worst;
        return { x: one.rounds, y: line, name: escaped(one.names[i]), mode: one.rounds.length > 1 && !(state.client && strong && one.rounds.length < 40) ? "lines" : "lines+markers", marker: { size: 5, color: paint }, line: { color: paint, width: strong ? 2.6 : 1.1 }, opacity: strong ? 1 : state.client ? 0.07 : Math.max(0.22, 0.55 - values.length / 400), hovertemplate: `<b>${escaped(one.names[i])}</b><br>round %{x}: %{y:.4~g}<extra></extra>` };
      });
      const strong = state.client ? alone : worst;
      const label = strong < 0 ? "" : `${state.client ? "" : "worst: "}${clipped(one.names[strong], 28)}, ${number(last(values[strong] || []))}`;
      const plot = card(byId("clients"), String(one.method), D.methods[one.method].name, label);
      draw(plot, traces, { xaxis: rounds(one.rounds), yaxis: all.length ? { range: [low - room, high + room] } : {}, height: 300 }, (point) => isolate(one.names[point.curveNumber]));
    }
    flush(byId("clients"));
  };

  // Final values: one dot per client, one row per method.
  const strip = () => {
    const key = `${state.split}.${metric()}`, rows = D.methods.length, traces = [], annotations = [];
    byId("head-strip").textContent = `${words(metric())[0].toUpperCase()}${words(metric()).slice(1)} at the end, per client`;
    byId("about-strip").textContent = `Each dot is a client${D.methods.some((method) => method.seeds.length > 1) ? " under one seed" : ""} on its ${state.split} data; the vertical line is the mean of the row. Click a dot to highlight this client in all plots.`;
    D.methods.forEach((method, i) => {
      const x = [], y = [], who = [], names = [], on = [];
      for (const one of D.clients.filter((each) => each.method === i)) {
        (one.values[key] || []).forEach((line, k) => {
          const value = last(line);
          if (value === null) return;
          x.push(value); y.push(rows - 1 - i + (((k * 0.618 + one.seed * 0.37) % 1) - 0.5) * 0.36);
          names.push(one.names[k]); who.push(`<b>${escaped(one.names[k])}</b>, seed ${one.seed}`);
          on.push(!state.client || one.names[k] === state.client);
        });
      }
      const mean = x.reduce((sum, value) => sum + value, 0) / x.length;
      traces.push({ x, y, customdata: names.map((name, k) => [name, who[k]]), mode: "markers", name: escaped(method.name), marker: { color: colour(i), size: on.map((yes) => (state.client && yes ? 13 : 9)), opacity: on.map((yes) => (yes ? (state.client ? 1 : 0.6) : 0.1)), line: { width: 1, color: css("--card") } }, hovertemplate: "%{customdata[1]}<br>%{x:.4~g}<extra></extra>" });
      if (x.length) traces.push({ x: [mean, mean], y: [rows - 1 - i - 0.24, rows - 1 - i + 0.24], mode: "lines", line: { color: css("--ink"), width: 2 }, hovertemplate: "mean %{x:.4~g}<extra></extra>", name: "mean" });
      annotations.push({ x: 0, xref: "paper", xanchor: "left", y: rows - 1 - i + 0.29, yanchor: "bottom", text: escaped(clipped(method.name, 44)), showarrow: false, font: { size: 13, color: css("--ink") } });
    });
    const plot = card(byId("strip"), "strip", "", "");
    draw(plot, traces, { annotations, height: 96 * rows + 60, margin: { l: 10, r: 14, t: 8, b: 44 }, xaxis: { title: { text: `${escaped(words(metric()))}, ${escaped(state.split)} data` } }, yaxis: { visible: false, range: [-0.45, rows - 0.3], fixedrange: true } }, (point) => { if (point.customdata) isolate(point.customdata[0]); });
    flush(byId("strip"));
  };

  // Weights: one row per client, one column per evaluated round; one colour scale for all methods.
  const weights = () => {
    const found = shownClients().filter((one) => one.weights && one.names.length);
    byId("section-weights").hidden = !found.length;
    const partial = found.some((one) => one.partial);
    byId("about-weights").textContent = `The weight r of each client per round; weights sum to 1${partial ? " (with partial participation: the weight that a client would have among all)" : ""}. Robust methods shift weight to clients with a larger loss.`;
    const top = found.flatMap((one) => one.weights.flat()).reduce((a, b) => Math.max(a, b || 0), 0);
    for (const one of found) {
      const n = one.names.length, places = one.names.map((_, i) => i), step = Math.ceil(n / 26);
      const ticks = places.filter((i) => i % step === 0), alone = one.names.indexOf(state.client);
      const trace = { type: "heatmap", x: one.rounds.map(String), y: places, z: one.weights, zmin: 0, zmax: top || 1, customdata: one.names.map((name) => one.rounds.map(() => escaped(name))), colorscale: [[0, css("--card")], [0.5, faded(colour(one.method), 0.55)], [1, colour(one.method)]], hovertemplate: "<b>%{customdata}</b><br>round %{x}: r = %{z:.4~g}<extra></extra>", colorbar: { thickness: 8, outlinewidth: 0, len: 1, x: 1.01, xpad: 4, nticks: 4 } };
      const shapes = alone < 0 ? [] : [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: alone - 0.5, y1: alone + 0.5, line: { color: css("--ink"), width: 2 } }];
      const plot = card(byId("weights"), String(one.method), D.methods[one.method].name, alone < 0 ? "" : `${clipped(state.client, 28)}, ${number(last(one.weights[alone]))} at the end`);
      draw(plot, [trace], { shapes, height: Math.max(190, Math.min(560, 15 * n + 80)), margin: { l: 30, r: 6, t: 10, b: 44 }, xaxis: { title: { text: "round" }, nticks: 8, type: "category" }, yaxis: { autorange: "reversed", tickmode: "array", tickvals: ticks, ticktext: ticks.map((i) => escaped(clipped(one.names[i], 16))), showgrid: false } }, (point) => isolate(one.names[point.y]));
    }
    flush(byId("weights"));
  };

  // Tables.
  const row = (cells) => { const made = element("tr"); made.append(...cells); return made; };
  const tables = () => {
    const table = D.table, several = D.methods.length > 1, seeds = table.rows.some((one) => one.seeds > 1);
    byId("about-table").textContent = `${table.about[0].toUpperCase()}${table.about.slice(1)} after the last evaluated round; every client counts equally.${seeds ? " Means over seeds; ± is the standard error." : ""}${several ? ` The best of a column is bold${seeds ? "; ~ within noise of it (two standard errors)" : ""}.` : ""}`;
    const head = element("thead"), body = element("tbody");
    head.append(row(["method", ...table.columns].map((name) => element("th", name, { scope: "col" }))));
    for (const one of table.rows) {
      const name = element("th", one.personal ? "" : one.name, { scope: "row" });
      if (one.personal) name.append(element("small", "personal models"));
      body.append(row([name, ...one.cells.map((cell) => {
        if (!cell) return element("td");
        const made = element("td", number(cell.value), cell.best ? { class: "best" } : {});
        if (cell.error !== null) made.append(element("small", ` ± ${Math.abs(cell.value) >= 100 ? cell.error.toFixed(1) : cell.error.toFixed(3)}`));
        if (cell.noise) made.append(" ~");
        return made;
      })]));
    }
    byId("table").replaceChildren(head, body);
    const { names, differ, same } = D.configs;
    const listed = (rows, more = []) => {
      const heads = element("thead"), lines = element("tbody");
      heads.append(row(["setting", ...names].map((name) => element("th", name, { scope: "col" }))));
      for (const one of [...more, ...rows]) lines.append(row([element("th", one.key, { scope: "row" }), ...one.values.map((value) => element("td", value))]));
      return [heads, lines];
    };
    byId("about-configs").textContent = differ.length ? "Settings that differ between the runs." : several ? "The runs have the same settings." : "";
    byId("differ").parentElement.hidden = !differ.length;
    byId("differ").replaceChildren(...listed(differ));
    byId("shared").querySelector("summary").textContent = names.length > 1 ? `${same.length} shared settings, and the seeds` : `All ${same.length} settings`;
    byId("same").replaceChildren(...listed(same, [{ key: "seeds", values: D.configs.seeds }]));
    byId("notes").replaceChildren(...D.notes.map((note) => element("li", note)));
  };

  const drawAll = () => {
    const waiting = Boolean(D.waiting);
    for (const part of document.querySelectorAll("section, #controls")) part.hidden = waiting;
    if (waiting) return;
    controls(); legend(); curves(); clients(); strip(); weights(); tables();
  };
  const show = (next) => {
    D = next;
    byId("title").textContent = D.title;
    byId("verdict").replaceChildren(...D.verdict.map((sentence) => element("p", sentence)));
    if (D.splits && !D.splits.includes(state.split)) state.split = D.split;
    drawAll();
  };
  addEventListener("keydown", (event) => { if (event.key === "Escape" && state.client) isolate(state.client); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();

  // A live page polls its server for updates and shows the state of the run.
  if (D.live) {
    let seen = "", missed = 0;
    const poll = async () => {
      try {
        const answer = await fetch(`data.json?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
        if (answer.status === 200) { const next = await answer.json(); seen = next.version; show(next); }
        missed = 0;
        byId("state").textContent = D.waiting ? "waiting" : D.done ? "finished" : "live";
      } catch (error) {
        missed += 1;
        byId("state").textContent = "comfedl watch does not answer";
      }
      document.documentElement.dataset.polled = seen;
      if (missed < 5) setTimeout(poll, 1500);
    };
    poll();
  }
})();
