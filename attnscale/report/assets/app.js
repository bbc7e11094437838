// The page of a run. One selection (step, quantity, statistic, layer, head), stored in the URL, determines all plots.

const by = (id) => document.getElementById(id);
const PHASES = { forward: "forward", backward: "backward", scalar: "per head" };
const STATISTICS = { mean: "mean", p10: "10 %", p50: "median", p90: "90 %", min: "minimum", max: "maximum", value: "–" };
const THEMES = ["auto", "light", "dark"];
const quantityKey = ({ phase, name }) => `${phase}.${name}`;
const gaps = run.quantities.filter(({ phase, name }) => phase === "forward" && name.startsWith("gap_count_"));
const PAGE = 100; // alerts per page

const state = {
  step: run.steps.length - 1, // an index
  quantity: run.quantities.find(({ name }) => name === "w_max") || run.quantities[0],
  statistic: "mean",
  layer: 0,
  head: 0, // index of the head in its layer
  range: "run",
  lines: "head",
  gap: gaps.length ? (gaps.find(({ name }) => name === "gap_count_1") || gaps[0]).name : "",
  kind: "",
  theme: "auto",
  table: "",
};
let alertsShown = PAGE, alertsDrawn = "";

const maps = {
  heads: new HeatMap(by("heads"), "layer by head"),
  steps: new HeatMap(by("steps"), "layer by step"),
};
const curve = new Chart(by("curve"), "curve over steps", 260);
const both = ["w_max", "entropy", "gap", "mismatch"].map((name) => titled(by("both"), name, (host) => new Chart(host, name, 190)));
const gainDots = titled(by("gain"), "gain-layers", (host) => new Chart(host, "gain by layer", 240));
const gainMap = titled(by("gain"), "gain-steps", (host) => new HeatMap(host, "gain, layer by step"));

// A plot with a heading.
function titled(host, id, make) {
  const box = document.createElement("div"), heading = document.createElement("h3"), inner = document.createElement("div");
  box.id = `plot-${id}`;
  box.append(heading, inner);
  host.append(box);
  return { heading, plot: make(inner) };
}

// --- selection and URL

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("step")) state.step = nearestStep(Number(given.get("step")));
  const wanted = given.get("quantity");
  const quantity = run.quantities.find((one) => quantityKey(one) === wanted) || run.quantities.find(({ name }) => name === wanted);
  if (quantity) state.quantity = quantity;
  if (given.get("statistic") in STATISTICS) state.statistic = given.get("statistic");
  const layer = run.layers.findIndex(({ name }) => name === given.get("layer"));
  if (layer >= 0) state.layer = layer;
  const head = run.layers[state.layer].heads.indexOf(Number(given.get("head")));
  if (given.has("head") && head >= 0) state.head = head;
  for (const [name, values] of Object.entries({
    range: ["run", "step"], lines: ["head", "heads", "layers"], gap: gaps.map(({ name }) => name), theme: THEMES,
    kind: ["", ...run.kinds], table: ["", "open"],
  })) if (values.includes(given.get(name))) state[name] = given.get(name);
  correctSelection();
}

function writeAddress() {
  const { step, quantity, statistic, layer, head } = state, { name, heads } = run.layers[layer];
  const parts = new URLSearchParams({ step: run.steps[step], quantity: quantityKey(quantity), statistic, layer: name, head: heads[head] });
  for (const key of ["range", "lines", "gap", "kind", "theme", "table"]) if (state[key]) parts.set(key, state[key]);
  try {
    history.replaceState(null, "", `#${parts}`);
  } catch {
    // In an embedded page the URL may be read-only.
  }
}

function nearestStep(wanted) {
  let best = 0;
  run.steps.forEach((step, index) => {
    if (Math.abs(step - wanted) < Math.abs(run.steps[best] - wanted)) best = index;
  });
  return best;
}

// Replace a statistic or head that does not exist.
function correctSelection() {
  const has = statisticsOf(state.quantity);
  if (!has.includes(state.statistic)) state.statistic = has[0];
  state.head = Math.min(state.head, run.layers[state.layer].heads.length - 1);
}

function statisticsOf({ phase, name }) {
  return run.planes.filter((plane) => plane.phase === phase && plane.name === name).map(({ statistic }) => statistic);
}

function choose(changes) {
  Object.assign(state, changes);
  correctSelection();
  writeAddress();
  render();
}

// --- values of a plane

const at = (values, step, column) => values[step * columns.length + column];
const columnOf = (layer, head) => firstColumn[layer] + head;
const overSteps = (values, column) => run.steps.map((_, step) => at(values, step, column));
const headsOf = (values, step, layer) => run.layers[layer].heads.map((_, head) => at(values, step, columnOf(layer, head)));
const kindsOf = (bits) => run.kinds.filter((_, index) => bits >> Math.min(index, 7) & 1);
const nameOf = (quantity) => quantity.label + (quantity.phase === "backward" ? " (backward)" : "");
const sentence = (text) => text[0].toUpperCase() + text.slice(1);

// Aggregates the heads of each layer and step; cached, since the result does not depend on the selection.
const joined = new WeakMap();
function perLayer(values, join) {
  if (!joined.has(values)) joined.set(values, new Map());
  const known = joined.get(values);
  if (!known.has(join)) known.set(join, run.layers.map((_, layer) => run.steps.map((_, step) => join(headsOf(values, step, layer)))));
  return known.get(join);
}
const alerting = (bits) => bits.filter((x) => x > 0).length;

// --- drawing

let drawing = 0;
async function render() {
  const turn = ++drawing, { phase, name } = state.quantity;
  const load = (statistic) => plane(phase, name, statistic);
  const [values, low, high, bits, gain, mismatch] = await Promise.all([
    load(state.statistic), load("p10"), load("p90"), alertBits(), plane("scalar", "gain", "value"),
    plane("scalar", "mismatch", "value"),
  ]);
  const pairs = await Promise.all(["w_max", "entropy", state.gap].map((each) => Promise.all(
    ["forward", "backward"].map((side) => plane(side, each, "mean")))));
  if (turn !== drawing) return; // the selection has changed in the meantime
  applyTheme();
  fillControls();
  const data = { values, low, high, bits };
  drawReadout(data);
  drawHeads(data);
  drawSteps(data);
  drawCurve(data);
  drawBoth(pairs, mismatch);
  drawGain(gain, bits);
  drawTable(values);
  drawAlerts();
  document.documentElement.dataset.ready = String(turn);
}

function drawReadout({ values, low, high, bits }) {
  const column = columnOf(state.layer, state.head), layer = run.layers[state.layer];
  const spread = low && high ? `, 10–90 % of rows: ${format(at(low, state.step, column))} to ${format(at(high, state.step, column))}` : "";
  const kinds = kindsOf(at(bits, state.step, column)), value = document.createElement("b"), alarm = document.createElement("span");
  value.id = "value";
  value.textContent = format(at(values, state.step, column));
  value.dataset.value = at(values, state.step, column);
  alarm.className = "alarm";
  alarm.textContent = kinds.length ? ` · alert: ${kinds.join(", ")}` : "";
  const which = state.statistic === "value" ? "" : `${STATISTICS[state.statistic]} of `;
  by("readout").replaceChildren(
    `Step ${run.steps[state.step]} · ${layer.name} · head ${layer.heads[state.head]}: ${which}${nameOf(state.quantity)} `, value, spread, alarm);
}

function drawHeads({ values, low, high, bits }) {
  const { step } = state, most = Math.max(...run.layers.map(({ heads }) => heads.length));
  const within = state.range === "run" ? values : values.subarray(step * columns.length, (step + 1) * columns.length);
  by("hint-heads").textContent = `${sentence(nameOf(state.quantity))} at step ${run.steps[step]}. Click a cell or use the arrow keys to select it.`;
  const inside = (layer, head) => head < run.layers[layer].heads.length;
  maps.heads.draw({
    rows: run.layers.map(({ short }) => short),
    columns: Array.from({ length: most }, (_, head) => String(head)),
    value: (layer, head) => inside(layer, head) ? at(values, step, columnOf(layer, head)) : undefined,
    marked: (layer, head) => inside(layer, head) && at(bits, step, columnOf(layer, head)) > 0,
    marks: run.kinds.length > 0,
    domain: domainOf(state.range === "run" ? state.quantity.name : "", [within]),
    selected: [state.layer, state.head],
    pick: (layer, head) => choose({ layer, head }),
    words: (layer, head) => {
      const column = columnOf(layer, head), kinds = kindsOf(at(bits, step, column));
      return [
        `${run.layers[layer].name} · head ${run.layers[layer].heads[head]} · step ${run.steps[step]}`,
        `${nameOf(state.quantity)}: ${format(at(values, step, column))}`,
        ...(low && high ? [`10–90 % of rows: ${format(at(low, step, column))} to ${format(at(high, step, column))}`] : []),
        ...(kinds.length ? [`alert: ${kinds.join(", ")}`] : []),
      ].join("\n");
    },
    across: "head",
    bar: state.quantity.label,
  });
}

// Heat map of layer × step.
function drawLayerSteps(map, name, text, numbers, bits) {
  const heads = perLayer(bits, alerting);
  map.draw({
    rows: run.layers.map(({ short }) => short),
    columns: run.steps.map(String),
    value: (layer, step) => numbers[layer][step],
    marked: (layer, step) => heads[layer][step] > 0,
    marks: run.kinds.length > 0,
    domain: domainOf(name, numbers),
    selected: [state.layer, state.step],
    pick: (layer, step) => choose({ layer, step }),
    words: (layer, step) => [
      `${run.layers[layer].name} · step ${run.steps[step]}`,
      `${text}: ${format(numbers[layer][step])}`,
      ...(heads[layer][step] ? [`${heads[layer][step]} of ${run.layers[layer].heads.length} heads with an alert`] : []),
    ].join("\n"),
    across: "step",
    bar: text,
  });
}

function drawSteps({ values, bits }) {
  by("hint-steps").textContent = `${sentence(nameOf(state.quantity))}, mean over heads: location and onset of changes.`;
  drawLayerSteps(maps.steps, state.quantity.name, state.quantity.label, perLayer(values, mean), bits);
}

function drawCurve({ values, low, high }) {
  const { layer, head } = state, own = run.layers[layer], accent = variable("--accent");
  const title = `head ${own.heads[head]}`, mine = overSteps(values, columnOf(layer, head));
  let series;
  if (state.lines === "head") {
    const centre = { label: title, legend: `${own.name}, ${title}`, values: mine, colour: accent };
    if (low && high) {
      const [bottom, top] = [low, high].map((each) => overSteps(each, columnOf(layer, head)));
      Object.assign(centre, { low: bottom, high: top, shade: variable("--band") });
    }
    series = [centre];
  } else if (state.lines === "heads") {
    series = own.heads.map((number, other) => ({
      label: `head ${number}`, values: overSteps(values, columnOf(layer, other)), colour: variable("--muted"), faint: true,
    })).filter((_, other) => other !== head);
    series.push({ label: title, legend: `${title}; grey: the others of ${own.name}`, values: mine, colour: accent });
  } else {
    // Colours that contrast with the background of either theme.
    const many = run.layers.length - 1 || 1, darkest = document.documentElement.dataset.theme === "dark" ? 0.35 : 0.05;
    series = run.layers.map(({ name, short }, other) => ({
      label: short, legend: run.layers.length <= 8 || other === 0 || other === many || other === layer ? name : "",
      values: perLayer(values, mean)[other], colour: colour(darkest + 0.65 * other / many), faint: other !== layer,
    }));
  }
  const which = state.statistic === "value" ? "" : `, ${STATISTICS[state.statistic]} over rows`;
  by("hint-curve").textContent = `${sentence(nameOf(state.quantity))}${which}. Click or use the arrow keys to select a step.`;
  drawOverSteps(curve, state.quantity.name, series);
}

function drawOverSteps(chart, name, series) {
  const arrays = series.flatMap(({ values, low, high }) => low ? [values, low, high] : [values]);
  chart.draw({
    x: run.steps, now: state.step, series, domain: padded(name, domainOf(name, arrays)), across: "step", tick: String,
    head: (index) => `step ${run.steps[index]}`, pick: (step) => choose({ step }),
  });
}

// Adds a margin above and below the lines, within the valid range.
function padded(name, { low, high, log }) {
  if (SHARES.has(name)) return { low, high, log };
  if (log) return { low: low / 1.2, high: high * 1.2, log };
  const margin = (high - low) * 0.05;
  return { low: low >= 0 ? Math.max(0, low - margin) : low - margin, high: high + margin, log };
}

function drawBoth(pairs, mismatch) {
  const column = columnOf(state.layer, state.head), { name, heads } = run.layers[state.layer];
  ["w_max", "entropy", state.gap].forEach((quantity, index) => {
    const [forward, backward] = pairs[index], series = [];
    if (forward) series.push({ label: "forward", legend: "forward", values: overSteps(forward, column), colour: variable("--accent") });
    if (backward) {
      series.push({ label: "backward", legend: "backward", values: overSteps(backward, column), colour: variable("--second"), dash: "5 4" });
    }
    both[index].heading.textContent = (run.quantities.find(({ name }) => name === quantity) || { title: quantity }).title;
    drawOverSteps(both[index].plot, quantity, series);
  });
  both[3].heading.textContent = "largest difference of any row";
  const values = run.steps.map((_, step) => mismatch ? at(mismatch, step, column) : NaN);
  drawOverSteps(both[3].plot, "mismatch", [{ label: "mismatch", values, colour: variable("--second") }]);
  let worst = 0, where = -1;
  for (let i = 0; mismatch && i < mismatch.length; i++) if (mismatch[i] > worst) [worst, where] = [mismatch[i], i];
  const verdict = !mismatch ? "This run has no backward records." : where < 0
    ? "Forward and backward agree in every head at every step."
    : `The largest difference of the run is ${format(worst)}, in ${describe(where)}.`;
  by("hint-both").textContent = `${name} · head ${heads[state.head]}: the same rows in the forward pass and recomputed in the backward pass. ${verdict}`;
}

function describe(index) {
  const { layer, head } = columns[index % columns.length];
  return `${run.layers[layer].name}, head ${head}, step ${run.steps[Math.floor(index / columns.length)]}`;
}

function drawGain(gain, bits) {
  gainDots.heading.textContent = `At step ${run.steps[state.step]}`;
  gainMap.heading.textContent = "Layer × step, median over heads";
  const none = () => run.layers.map(() => NaN), { step } = state;
  const most = Math.max(...run.layers.map(({ heads }) => heads.length));
  const series = [];
  for (let head = 0; gain && head < most; head++) {
    const values = run.layers.map(({ heads }, layer) => head < heads.length ? at(gain, step, columnOf(layer, head)) : NaN);
    series.push({ label: `head ${head}`, legend: head === 0 ? "one head" : "", values, colour: variable("--accent"), dots: true });
  }
  const middle = (index) => perLayer(gain, median).map((steps) => steps[index]);
  if (gain && step > 0) {
    series.push({ label: `median at step ${run.steps[0]}`, legend: `median at step ${run.steps[0]}`, values: middle(0), colour: variable("--muted"), dash: "5 4" });
  }
  series.push({ label: "median", legend: "median over heads", values: gain ? middle(step) : none(), colour: variable("--text") });
  gainDots.plot.draw({
    x: run.layers.map((_, layer) => layer), now: state.layer, series, across: "layer",
    domain: padded("gain", domainOf("gain", series.map(({ values }) => values))),
    tick: (layer) => run.layers.length <= 8 ? run.layers[layer].short : String(layer),
    head: (layer) => `${run.layers[layer].name} · step ${run.steps[step]}`,
    pick: (layer) => choose({ layer }),
  });
  const numbers = gain ? perLayer(gain, median) : run.layers.map(() => run.steps.map(() => NaN));
  drawLayerSteps(gainMap.plot, "gain", "gain", numbers, bits);
}

// --- tables

function row(cells, tag) {
  const line = document.createElement("tr");
  for (const [text, kind] of cells) {
    const cell = document.createElement(tag);
    cell.textContent = text;
    cell.className = kind || "";
    line.append(cell);
  }
  return line;
}

function drawTable(values) {
  const box = by("table");
  box.open = state.table === "open";
  if (!box.open) return;
  const most = Math.max(...run.layers.map(({ heads }) => heads.length)), table = document.createElement("table");
  table.append(row([["layer"], ...Array.from({ length: most }, (_, head) => [`head ${head}`, "number"])], "th"));
  run.layers.forEach(({ name }, layer) => {
    table.append(row([[name], ...headsOf(values, state.step, layer).map((x) => [format(x), "number"])], "td"));
  });
  box.querySelector("div").replaceChildren(table);
}

function drawAlerts() {
  const wanted = `${state.kind} ${alertsShown}`;
  if (wanted === alertsDrawn) return;
  alertsDrawn = wanted;
  const chosen = run.alerts.filter(({ kind }) => !state.kind || kind === state.kind), body = by("alerts").tBodies[0];
  const left = run.groupCount - run.alerts.length;
  by("hint-alerts").textContent = run.alertCount
    ? `${run.alertCount} alerts in ${run.groupCount} groups by kind and head${left ? `; the ${left} groups that began last are omitted` : ""}. Click a row to go to its first step.`
    : "No threshold was exceeded.";
  by("kind").parentElement.hidden = by("alerts").hidden = !run.alertCount;
  by("alerts").tHead.replaceChildren(row([["kind"], ["layer"], ["head", "number"], ["steps"], ["count", "number"], ["latest value", "number"], ["limit", "number"], ["message"]], "th"));
  body.replaceChildren(...chosen.slice(0, alertsShown).map((alert) => {
    const when = alert.first === alert.last ? `${alert.first}` : `${alert.first} to ${alert.last}`;
    const line = row([["", "kind"], [alert.layer], [alert.head, "number"], [when], [alert.count, "number"],
      [format(Number(alert.value)), "number"], [format(Number(alert.limit)), "number"], [alert.message, "text"]], "td");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = alert.kind;
    button.title = run.meanings[alert.kind].explanation;
    line.cells[0].append(button);
    line.addEventListener("click", () => goTo(alert));
    return line;
  }));
  by("more").hidden = chosen.length <= alertsShown;
  by("more").textContent = `show more (${Math.max(0, chosen.length - alertsShown)} remaining)`;
}

function goTo({ kind, layer, head, first }) {
  const place = run.layers.findIndex(({ name }) => name === layer), changes = { step: nearestStep(first) };
  if (place >= 0) Object.assign(changes, { layer: place, head: Math.max(0, run.layers[place].heads.indexOf(head)) });
  const quantity = run.quantities.find((one) => quantityKey(one) === run.meanings[kind].quantity);
  if (quantity) changes.quantity = quantity;
  choose(changes);
  by("controls").scrollIntoView({ block: "start" });
}

// --- controls

function option(value, text, title = "") {
  const made = document.createElement("option");
  Object.assign(made, { value, title, textContent: text });
  return made;
}

function fillControls() {
  by("step").value = state.step;
  by("step").setAttribute("aria-valuetext", `step ${run.steps[state.step]}`);
  by("step-value").textContent = run.steps[state.step];
  by("quantity").value = quantityKey(state.quantity);
  by("statistic").replaceChildren(...statisticsOf(state.quantity).map((name) => option(name, STATISTICS[name])));
  by("statistic").disabled = state.statistic === "value";
  by("head").replaceChildren(...run.layers[state.layer].heads.map((head, index) => option(index, head)));
  for (const name of ["statistic", "layer", "head", "range", "lines", "gap", "kind"]) by(name).value = state[name];
  by("earlier").disabled = state.step === 0;
  by("later").disabled = state.step === run.steps.length - 1;
}

function setUp() {
  by("run").textContent = run.path.split(/[\\/]/).pop();
  const [first, last] = [run.steps[0], run.steps[run.steps.length - 1]], heads = columns.length;
  const alarm = document.createElement("span");
  alarm.className = run.alertCount ? "alarm" : "";
  alarm.textContent = run.alertCount ? `${run.alertCount} alerts` : "no alerts";
  by("about").append(`${run.layers.length} layers, ${heads} heads, ${run.reported} reports from step ${first} to ${last} · `, alarm);
  const thinner = run.steps.length < run.reported ? ` To limit the size of the page, ${run.steps.length} of ${run.reported} reports are shown.` : "";
  const rounded = run.exact ? "" : " Values are rounded to about four digits; bands may be coarser.";
  by("footer").textContent = `${run.path} · attnscale ${run.version}. Entropy and logits are in nats, after temperature; N(t) uses raw scores.${thinner}${rounded}`;
  for (const [phase, text] of Object.entries(PHASES)) {
    const group = document.createElement("optgroup");
    group.label = text;
    group.append(...run.quantities.filter((one) => one.phase === phase).map((one) => option(quantityKey(one), nameOf(one), one.explanation)));
    if (group.children.length) by("quantity").append(group);
  }
  by("step").max = run.steps.length - 1;
  by("layer").append(...run.layers.map(({ name }, index) => option(index, name)));
  by("gap").append(...gaps.map(({ name }) => option(name, name.replace("gap_count_", ""))));
  by("gap").parentElement.hidden = !gaps.length;
  by("kind").append(option("", "all"), ...run.kinds.map((kind) => option(kind, kind)));
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("step").addEventListener("input", () => choose({ step: Number(by("step").value) }));
  by("earlier").addEventListener("click", () => choose({ step: Math.max(0, state.step - 1) }));
  by("later").addEventListener("click", () => choose({ step: Math.min(run.steps.length - 1, state.step + 1) }));
  by("quantity").addEventListener("change", () => choose({ quantity: run.quantities.find((one) => quantityKey(one) === by("quantity").value) }));
  for (const name of ["layer", "head"]) by(name).addEventListener("change", () => choose({ [name]: Number(by(name).value) }));
  for (const name of ["statistic", "range", "lines", "gap"]) by(name).addEventListener("change", () => choose({ [name]: by(name).value }));
  by("kind").addEventListener("change", () => { alertsShown = PAGE; choose({ kind: by("kind").value }); });
  by("more").addEventListener("click", () => { alertsShown += PAGE; drawAlerts(); });
  by("table").addEventListener("toggle", () => {
    const wanted = by("table").open ? "open" : "";
    if (wanted !== state.table) choose({ table: wanted });
  });
  by("theme").addEventListener("click", () => choose({ theme: THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length] }));
}

// --- theme, resizing and printing

const darkness = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
function applyTheme() {
  const dark = !paper.matches && (state.theme === "dark" || state.theme === "auto" && darkness.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  by("theme").textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[state.theme];
}

setUp();
readAddress();
applyTheme();
render();
addEventListener("hashchange", () => { readAddress(); render(); });
darkness.addEventListener("change", render);
paper.addEventListener("change", render);
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(render); });
