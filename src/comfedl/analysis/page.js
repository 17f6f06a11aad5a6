"use strict";
(() => {
  let D = JSON.parse(document.getElementById("data").textContent);
  const ALL = "all"; // seeds
  const state = { split: D.split, metric: D.metric, personal: D.first === "personal", client: "", seed: ALL, sort: { column: 0, down: null }, hidden: new Set() };
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
  const metric = () => (state.personal ? "personal_" : "") + state.metric;
  const key = () => `${state.split}.${metric()}`;
  const words = (name) => name.replace("personal_", "personal ").replace(/_/g, " ");
  const smaller = () => D.smaller.includes(state.metric);
  const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`);

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
    if (state.seed !== ALL && !seeds.includes(state.seed)) state.seed = ALL;
    if (!D.metrics.includes(state.metric)) state.metric = D.metric;
    const names = [...new Set(shownClients().flatMap((one) => one.names))];
    if (!names.includes(state.client)) state.client = "";
    if (D.splits.length > 1) parts.push(choice("Data", D.splits.map((name) => [name, name]), state.split, (value) => { state.split = value; state.sort = { column: 0, down: null }; }));
    if (D.metrics.length > 1) parts.push(selection("Measure", "measure", D.metrics.map((name) => [name, words(name)]), state.metric, (value) => { state.metric = value; state.sort = { column: 0, down: null }; }));
    if (D.personal) parts.push(choice("Model", [[false, "global"], [true, "personal"]], state.personal, (value) => { state.personal = value; }));
    if (seeds.length > 1) parts.push(selection("Clients of", "seed", [[ALL, "all seeds"], ...seeds.map((seed) => [String(seed), `seed ${seed}`])], String(state.seed), (value) => { state.seed = value === ALL ? ALL : Number(value); }));
    if (names.length) parts.push(selection("Client", "client", [["", "all clients"], ...names.map((name) => [name, clipped(name, 40)])], state.client, (value) => { state.client = value; }));
    const held = document.activeElement && document.activeElement.id;
    byId("controls").replaceChildren(...parts);
    if (held && byId("controls").querySelector(`#${CSS.escape(held)}`)) byId(held).focus();
  };
  const isolate = (name) => {
    state.client = state.client === name ? "" : name;
    if (byId("client")) byId("client").value = state.client;
    clients(); strip(); byClient(); weights();
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

  // Clients: one line per client and seed; one client can be highlighted, otherwise the worst of each seed is.
  const shownClients = () => D.clients.filter((one) => state.seed === ALL || one.seed === state.seed);
  const last = (line) => { for (let i = line.length - 1; i >= 0; i--) if (line[i] !== null) return line[i]; return null; };
  const worstOf = (ends) => {
    let found = -1;
    ends.forEach((value, i) => {
      if (value !== null && (found < 0 || (smaller() ? value > ends[found] : value < ends[found]))) found = i;
    });
    return found;
  };
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const clients = () => {
    const several = new Set(shownClients().map((one) => one.seed)).size > 1;
    byId("about-clients").textContent = `The ${words(metric())} of each client on its ${state.split} data${several ? ", a line for each seed" : ""}; the worst client${several ? " of each seed" : ""} is highlighted. Hover over a line to see the client's name, click to isolate the client, click again to show all. ${D.sampled.join(" ")}`;
    const all = shownClients().flatMap((one) => (one.values[key()] || []).flat()).filter((value) => value !== null);
    const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity), room = (high - low) * 0.05 || 0.05;
    for (const method of new Set(shownClients().map((one) => one.method))) {
      const runs = shownClients().filter((one) => one.method === method), paint = colour(method), traces = [], who = [], strongEnds = [], strongNames = [];
      for (const one of runs) {
        const values = one.values[key()] || [], ends = one.ends[key()] || [], strong = state.client ? one.names.indexOf(state.client) : worstOf(ends);
        values.forEach((line, i) => {
          const bold = i === strong, dots = one.rounds.length === 1 || (state.client && bold && one.rounds.length < 40);
          traces.push({ x: one.rounds, y: line, name: escaped(one.names[i]), mode: dots ? "lines+markers" : "lines", marker: { size: 5, color: paint }, line: { color: paint, width: bold ? 2.6 : 1.1 }, opacity: bold ? 1 : state.client ? 0.07 : Math.max(0.22, 0.55 - values.length / 400), hovertemplate: `<b>${escaped(one.names[i])}</b>${several ? `, seed ${one.seed}` : ""}<br>round %{x}: %{y:.4~g}<extra></extra>` });
          who.push(one.names[i]);
        });
        if (strong >= 0 && ends[strong] !== null && ends[strong] !== undefined) { strongEnds.push(ends[strong]); strongNames.push(one.names[strong]); }
      }
      const same = new Set(strongNames).size === 1, name = same ? `${clipped(strongNames[0] || "", 28)}, ` : "", seeds = runs.map((one) => one.seed);
      const whose = D.methods[method].seeds.length > 1 ? (runs.length > 1 ? `, mean of seeds ${listed(seeds)}` : `, seed ${seeds[0]}`) : "";
      const label = strongEnds.length ? `${state.client ? "" : same ? "worst: " : "worst client: "}${name}${number(mean(strongEnds))}${whose}` : "";
      const rounded = runs.reduce((most, one) => (one.rounds.length > most.length ? one.rounds : most), []);
      const plot = card(byId("clients"), String(method), D.methods[method].name, label);
      draw(plot, traces, { xaxis: rounds(rounded), yaxis: all.length ? { range: [low - room, high + room] } : {}, height: 300 }, (point) => isolate(who[point.curveNumber]));
    }
    flush(byId("clients"));
  };

  // Final values: one dot per client, one row per method.
  const strip = () => {
    const rows = D.methods.length, traces = [], annotations = [], several = new Set(shownClients().map((one) => one.seed)).size > 1;
    byId("head-strip").textContent = `${words(metric())[0].toUpperCase()}${words(metric()).slice(1)} at the end, per client`;
    byId("about-strip").textContent = `Each dot is a client${several ? " under one seed" : ""} on its ${state.split} data; the vertical line is the mean of the row. Click a dot to highlight this client in all plots.`;
    D.methods.forEach((method, i) => {
      const x = [], y = [], who = [], names = [], on = [];
      for (const one of shownClients().filter((each) => each.method === i)) {
        (one.ends[key()] || []).forEach((value, k) => {
          if (value === null) return;
          x.push(value); y.push(rows - 1 - i + (((k * 0.618 + one.seed * 0.37) % 1) - 0.5) * 0.36);
          names.push(one.names[k]); who.push(`<b>${escaped(one.names[k])}</b>, seed ${one.seed}`);
          on.push(!state.client || one.names[k] === state.client);
        });
      }
      const middle = mean(x);
      traces.push({ x, y, customdata: names.map((name, k) => [name, who[k]]), mode: "markers", name: escaped(method.name), marker: { color: colour(i), size: on.map((yes) => (state.client && yes ? 13 : 9)), opacity: on.map((yes) => (yes ? (state.client ? 1 : 0.6) : 0.1)), line: { width: 1, color: css("--card") } }, hovertemplate: "%{customdata[1]}<br>%{x:.4~g}<extra></extra>" });
      if (x.length) traces.push({ x: [middle, middle], y: [rows - 1 - i - 0.24, rows - 1 - i + 0.24], mode: "lines", line: { color: css("--ink"), width: 2 }, hovertemplate: "mean %{x:.4~g}<extra></extra>", name: "mean" });
      annotations.push({ x: 0, xref: "paper", xanchor: "left", y: rows - 1 - i + 0.29, yanchor: "bottom", text: escaped(clipped(method.name, 44)), showarrow: false, font: { size: 13, color: css("--ink") } });
    });
    const plot = card(byId("strip"), "strip", "", "");
    draw(plot, traces, { annotations, height: 96 * rows + 60, margin: { l: 10, r: 14, t: 8, b: 44 }, xaxis: { title: { text: `${escaped(words(metric()))}, ${escaped(state.split)} data` } }, yaxis: { visible: false, range: [-0.45, rows - 0.3], fixedrange: true } }, (point) => { if (point.customdata) isolate(point.customdata[0]); });
    flush(byId("strip"));
  };

  // The table by client: a column per method and one for its difference from the method that others are compared with.
  const signed = (value, points) => {
    if (value === null) return "–";
    const text = points ? (100 * value).toFixed(1) : number(Math.abs(value) < 5e-4 ? 0 : value);
    return value > 0 && Number(text) !== 0 ? `+${text}` : text.replace("-", "−");
  };
  const byClientColumns = (view) => {
    const B = D.byClient, first = view.methods.find((one) => one.method === B.baseline), points = B.shares.includes(state.metric), columns = [];
    const better = (a, b) => (smaller() ? a < b : a > b);
    for (const split of [...new Set(["train", state.split])]) {
      if (view.samples[split]) columns.push({ head: `${split} samples`, values: view.samples[split], text: (k) => (view.samples[split][k] === null ? "–" : view.samples[split][k].toLocaleString("en")) });
    }
    for (const one of view.methods) {
      const values = one.values[key()] || [], low = one.low[key()] || [], high = one.high[key()] || [];
      columns.push({ head: B.methods[one.method], values, low, high, better, marksWorst: true, text: (k) => number(values[k]) });
      if (!first || one === first || !(first.values[key()] || []).length) continue;
      const change = values.map((value, k) => (value === null || first.values[key()][k] === null ? null : value - first.values[key()][k]));
      columns.push({ head: `${B.methods[one.method]} − ${B.methods[first.method]}${points ? ", points" : ""}`, values: change, better, text: (k) => signed(change[k], points) });
    }
    return columns;
  };
  const extreme = (column, wins) => column.values.reduce((found, value, k) => (value !== null && (found < 0 || wins(value, column.values[found])) ? k : found), -1);
  const byClient = () => {
    const B = D.byClient, view = B.views.find((one) => one.seed === (state.seed === ALL ? null : state.seed)) || B.views[0];
    const columns = byClientColumns(view), valued = columns.findIndex((column) => column.marksWorst);
    byId("section-by-client").hidden = !B.names.length || valued < 0;
    if (state.sort.down === null) state.sort = { column: valued + 1, down: smaller() }; // the worst first
    const { column, down } = state.sort, order = B.names.map((_, k) => k);
    const sorted = column ? (columns[column - 1] || columns[valued]).values : null;
    if (sorted) order.sort((a, b) => (sorted[a] === null) - (sorted[b] === null) || (down ? sorted[b] - sorted[a] : sorted[a] - sorted[b]) || a - b);
    else if (down) order.reverse();
    const means = view.seed === null && view.label ? ` Values are ${view.label}, and so are the bounds of the intervals.` : view.label ? ` Values of ${view.label}.` : "";
    const ranges = columns.some((one) => one.low && one.low.some((value) => value !== null)) ? ` Below a value is its 95 % confidence interval (${B.intervals[key()]}), which reflects only the client's number of samples.` : "";
    byId("about-by-client").textContent = `${words(metric())[0].toUpperCase()}${words(metric()).slice(1)} on ${state.split} data, of the final models (after the last evaluated round, or the best by early stopping).${ranges}${means} The best of a column is bold, the worst client highlighted. Click on a heading to sort, or on a name to single out the client in all plots.`;
    const head = element("thead"), body = element("tbody");
    head.append(row(["client", ...columns.map((one) => one.head)].map((name, i) => {
      const cell = element("th", undefined, { scope: "col" }), button = element("button", `${name}${i === column ? (down ? " ↓" : " ↑") : ""}`, { type: "button" });
      if (i === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        state.sort = { column: i, down: i === column ? !down : i > 0 };
        byClient();
        byId("by-client").querySelectorAll("thead button")[i].focus();
      });
      cell.append(button);
      return cell;
    })));
    const best = columns.map((one) => (one.better ? extreme(one, one.better) : -1));
    const worst = columns.map((one) => (one.marksWorst ? extreme(one, (a, b) => one.better(b, a)) : -1));
    for (const k of order) {
      const name = element("th", undefined, { scope: "row" }), button = element("button", B.names[k], { type: "button" });
      button.addEventListener("click", () => isolate(B.names[k]));
      name.append(button);
      const line = row([name, ...columns.map((one, i) => {
        const kinds = [...(best[i] === k ? ["best"] : []), ...(worst[i] === k ? ["worst"] : [])].join(" ");
        const cell = element("td", one.text(k), kinds ? { class: kinds } : {});
        if (one.low && one.low[k] !== null && one.low[k] !== undefined) cell.append(element("small", `${number(one.low[k])} to ${number(one.high[k])}`, { class: "range" }));
        return cell;
      })]);
      if (B.names[k] === state.client) line.className = "chosen";
      body.append(line);
    }
    byId("by-client").replaceChildren(head, body);
    hints();
  };
  // Where a table is wider than its box, a line above it says so: touch screens hide the scroll bar.
  const hints = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      let hint = box.previousElementSibling;
      if (!hint || !hint.classList.contains("swipe")) {
        hint = element("p", "Scroll sideways to see all columns →", { class: "swipe" });
        box.before(hint);
      }
      hint.hidden = box.scrollWidth <= box.clientWidth + 1;
    }
  };
  addEventListener("resize", hints);
  byId("shared").addEventListener("toggle", hints);

  // Weights: one row per client, one column per evaluated round; one colour scale for all methods.
  const weighed = () => {
    const out = [];
    for (const method of new Set(shownClients().map((one) => one.method))) {
      const runs = shownClients().filter((one) => one.method === method && one.weights && one.names.length);
      if (!runs.length) continue;
      const alike = runs.every((one) => one.names.join("\n") === runs[0].names.join("\n") && one.rounds.join() === runs[0].rounds.join());
      const used = alike ? runs : runs.slice(0, 1), whose = D.methods[method].seeds.length > 1 ? (used.length > 1 ? `mean of seeds ${listed(used.map((one) => one.seed))}` : `seed ${used[0].seed}`) : "";
      const averaged = runs[0].weights.map((line, i) => line.map((_, j) => { const all = used.map((one) => one.weights[i][j]).filter((value) => value !== null); return all.length ? mean(all) : null; }));
      out.push({ ...runs[0], weights: averaged, whose });
    }
    return out;
  };
  const weights = () => {
    const found = weighed();
    byId("section-weights").hidden = !found.length;
    const partial = found.some((one) => one.partial);
    byId("about-weights").textContent = `The weight r of each client per round; weights sum to 1${partial ? " (with partial participation: the weight that a client would have among all)" : ""}. Robust methods shift weight to clients with a larger loss.`;
    const top = found.flatMap((one) => one.weights.flat()).reduce((a, b) => Math.max(a, b || 0), 0);
    for (const one of found) {
      const n = one.names.length, places = one.names.map((_, i) => i), step = Math.ceil(n / 26);
      const ticks = places.filter((i) => i % step === 0), alone = one.names.indexOf(state.client);
      const trace = { type: "heatmap", x: one.rounds.map(String), y: places, z: one.weights, zmin: 0, zmax: top || 1, customdata: one.names.map((name) => one.rounds.map(() => escaped(name))), colorscale: [[0, css("--card")], [0.5, faded(colour(one.method), 0.55)], [1, colour(one.method)]], hovertemplate: "<b>%{customdata}</b><br>round %{x}: r = %{z:.4~g}<extra></extra>", colorbar: { thickness: 8, outlinewidth: 0, len: 1, x: 1.01, xpad: 4, nticks: 4 } };
      const shapes = alone < 0 ? [] : [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: alone - 0.5, y1: alone + 0.5, line: { color: css("--ink"), width: 2 } }];
      const plot = card(byId("weights"), String(one.method), D.methods[one.method].name, [...(alone < 0 ? [] : [`${clipped(state.client, 28)}, ${number(last(one.weights[alone]))} at the end`]), ...(one.whose ? [one.whose] : [])].join(", "));
      draw(plot, [trace], { shapes, height: Math.max(190, Math.min(560, 15 * n + 80)), margin: { l: 30, r: 6, t: 10, b: 44 }, xaxis: { title: { text: "round" }, nticks: 8, type: "category" }, yaxis: { autorange: "reversed", tickmode: "array", tickvals: ticks, ticktext: ticks.map((i) => escaped(clipped(one.names[i], 16))), showgrid: false } }, (point) => isolate(one.names[point.y]));
    }
    flush(byId("weights"));
  };

  // Tables.
  const row = (cells) => { const made = element("tr"); made.append(...cells); return made; };
  const tables = () => {
    const table = D.tables[`${state.split}.${state.metric}`] || D.table, several = table.rows.length > 1, seeds = table.rows.some((one) => one.seeds > 1);
    byId("about-table").textContent = `${table.about[0].toUpperCase()}${table.about.slice(1)}, of the final models; every client counts equally.${seeds ? " Means over seeds; ± is the standard error." : ""}${several ? ` The best of a column is bold${seeds ? "; ~ within noise of it (two standard errors)" : ""}.` : ""}`;
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
    byId("about-configs").textContent = differ.length ? "Settings that differ between the runs." : names.length > 1 ? "The runs have the same settings." : "";
    byId("differ").parentElement.hidden = !differ.length;
    byId("differ").replaceChildren(...listed(differ));
    byId("shared").querySelector("summary").textContent = names.length > 1 ? `${same.length} shared settings, and the seeds` : `All ${same.length} settings`;
    byId("same").replaceChildren(...listed(same, [{ key: "seeds", values: D.configs.seeds }]));
    byId("notes").replaceChildren(...D.notes.map((note) => element("li", note)));
    byId("about-personal").hidden = !D.personal;
    hints();
  };

  const drawAll = () => {
    const waiting = Boolean(D.waiting);
    for (const part of document.querySelectorAll("section, #controls, #about-personal")) part.hidden = waiting;
    if (waiting) return;
    controls(); legend(); curves(); clients(); strip(); byClient(); weights(); tables();
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
        byId("state").textContent = "No answer from comfedl watch";
      }
      document.documentElement.dataset.polled = seen;
      if (missed < 5) setTimeout(poll, 1500);
    };
    poll();
  }
})();
