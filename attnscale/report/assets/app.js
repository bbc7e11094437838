// One selection (run, step, quantity, statistic, layer, head), stored in the URL, determines all plots.

const PHASES = { forward: "forward", backward: "backward", scalar: "per head" };
const THEMES = ["auto", "light", "dark"];

// Opens on the run with the worst event, at the head that shows it most clearly.
const SEVERITIES = ["critical", "warning"];
const rank = ({ events }) => events.length ? SEVERITIES.indexOf(events[0].severity) : SEVERITIES.length;
const first = runs.reduce((best, run, index) => rank(run) < rank(runs[best]) ? index : best, 0);
const { opens } = runs[first], opened = runs[first].columns[opens.column];
const state = {
  run: first,
  step: opens.step, // an index
  quantity: page.quantities.find(({ name }) => name === opens.quantity) || page.quantities[0],
  statistic: "",
  layer: opened.layer,
  head: opened.head, // index of the head in its layer
  range: "run",
  lines: "head",
  gap: gaps.length ? (gaps.find(({ name }) => name === "gap_count_1") || gaps[0]).name : "",
  theme: "auto",
  table: "",
  more: "",
};
const chosen = () => runs[state.run];
const chosenStep = () => chosen().steps[state.step];

// The selected head in a run, found by name; -1 where the run does not have it.
function located(run) {
  const { name, heads } = chosen().layers[state.layer];
  const layer = run === chosen() ? state.layer : run.layers.findIndex((one) => one.name === name);
  const head = layer < 0 ? -1 : run.layers[layer].heads.indexOf(heads[state.head]);
  return { layer, head, column: head < 0 ? -1 : columnOf(run, layer, head) };
}

// --- selection and URL

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const run = runs.findIndex(({ label }) => label === given.get("run"));
  if (run >= 0) switchRun(run);
  if (given.has("step")) state.step = indexNearest(chosen().steps, Number(given.get("step")));
  const wanted = given.get("quantity");
  const quantity = page.quantities.find((one) => quantityKey(one) === wanted) || page.quantities.find(({ name }) => name === wanted);
  if (quantity && quantity !== state.quantity) Object.assign(state, { quantity, statistic: "" });
  if (given.get("statistic") in STATISTICS) state.statistic = given.get("statistic");
  const layer = chosen().layers.findIndex(({ name }) => name === given.get("layer"));
  if (layer >= 0) state.layer = layer;
  const head = chosen().layers[state.layer].heads.indexOf(Number(given.get("head")));
  if (given.has("head") && head >= 0) state.head = head;
  for (const [name, values] of Object.entries({
    range: ["run", "step"], lines: ["head", "heads", "layers"], gap: gaps.map(({ name }) => name), theme: THEMES,
    table: ["", "open"], more: ["", "open"],
  })) if (values.includes(given.get(name))) state[name] = given.get(name);
  correctSelection();
}

function writeAddress() {
  const { step, quantity, statistic, layer, head } = state, { steps, layers, label } = chosen();
  const parts = new URLSearchParams({
    step: steps[step], quantity: quantityKey(quantity), statistic, layer: layers[layer].name, head: layers[layer].heads[head],
    ...(runs.length > 1 ? { run: label } : {}),
  });
  for (const key of ["range", "lines", "gap", "theme", "table", "more"]) if (state[key]) parts.set(key, state[key]);
  try {
    history.replaceState(null, "", `#${parts}`);
  } catch {
    // In an embedded page the URL may be read-only.
  }
}

// Keeps step, layer and head of the selection where the other run has them.
function switchRun(index) {
  const step = indexNearest(runs[index].steps, chosenStep()), { layer, head } = located(runs[index]);
  Object.assign(state, { run: index, step, layer: Math.max(0, layer), head: Math.max(0, head) });
}

// Replace a statistic or head that does not exist.
function correctSelection() {
  const has = statisticsOf(state.quantity);
  if (!has.includes(state.statistic)) state.statistic = has.includes(state.quantity.shown) ? state.quantity.shown : has[0];
  state.layer = Math.min(state.layer, chosen().layers.length - 1);
  state.head = Math.min(state.head, chosen().layers[state.layer].heads.length - 1);
}

function statisticsOf({ phase, name }) {
  const planes = runs.flatMap((run) => run.planes).filter((one) => one.phase === phase && one.name === name);
  return [...new Set(planes.map(({ statistic }) => statistic))];
}

function choose(changes) {
  Object.assign(state, changes);
  correctSelection();
  writeAddress();
  render();
}

// --- drawing

let drawing = 0;
async function render() {
  const turn = ++drawing, { phase, name } = state.quantity, open = state.more === "open";
  const data = await Promise.all(runs.map(async (run) => {
    const wanted = [[phase, name, state.statistic], [phase, name, "p10"], [phase, name, "p90"], ["forward", "first_share", "mean"]];
    const [values, low, high, first] = await Promise.all(wanted.map((key) => plane(run, ...key)));
    return { values, low, high, first };
  }));
  const shown = await loadPanels(MAIN), others = open ? await loadPanels(REST) : [];
  const one = (...key) => plane(chosen(), ...key);
  const pairs = open ? await Promise.all(["w_max", "entropy", state.gap].map((each) => Promise.all(
    ["forward", "backward"].map((side) => one(side, each, "mean"))))) : [];
  const [gain, mismatch] = await Promise.all(["gain", "mismatch"].map((each) => one("scalar", each, "value")));
  if (turn !== drawing) return; // the selection has changed in the meantime
  applyTheme();
  fillControls(data);
  drawReadout(data);
  drawMain(shown, data);
  drawHeads(data);
  drawSteps(data);
  drawCurve(data);
  drawTable(data[state.run].values);
  by("more").open = open;
  if (open) {
    drawRest(others);
    drawBoth(pairs, mismatch);
    drawGain(gain);
  }
  document.documentElement.dataset.ready = String(turn);
}

function drawReadout(data) {
  const run = chosen(), { values, low, high, first } = data[state.run], { column } = located(run), layer = run.layers[state.layer];
  const number = (plane) => at(run, plane, state.step, column);
  const spread = low && high ? `, 10–90 % of rows: ${format(number(low))} to ${format(number(high))}` : "";
  const events = eventsOf(run, state.layer, state.head, chosenStep());
  const value = element("b", "", format(number(values))), alarm = element("span", "alarm", events.length ? ` · event: ${titlesOf(events)}` : "");
  value.id = "value";
  value.dataset.value = number(values);
  const which = state.statistic === "value" ? "" : `${STATISTICS[state.statistic]} of `;
  const sink = isSink(run, first, state.step, column) ? ` · attention sink: ${Math.round(100 * number(first))} % of the weight is on the first keys` : "";
  const where = `${runs.length > 1 ? `${run.label} · ` : ""}Step ${chosenStep()} · ${layer.name} · head ${layer.heads[state.head]}`;
  by("readout").replaceChildren(`${where}: ${which}${nameOf(state.quantity)} `, value, spread, sink, alarm);
}

// --- controls

function option(value, text, title = "") {
  const made = document.createElement("option");
  Object.assign(made, { value, title, textContent: text });
  return made;
}

function fillControls(data) {
  const run = chosen(), { layers, steps } = run, { first } = data[state.run];
  by("step").max = steps.length - 1;
  by("step").value = state.step;
  by("step").setAttribute("aria-valuetext", `step ${chosenStep()}`);
  by("step-value").textContent = chosenStep();
  by("quantity").value = quantityKey(state.quantity);
  by("quantity").title = state.quantity.term || state.quantity.explanation;
  by("statistic").replaceChildren(...statisticsOf(state.quantity).map((name) => option(name, STATISTICS[name])));
  by("statistic").disabled = state.statistic === "value";
  by("layer").replaceChildren(...layers.map(({ name }, index) => option(index, name)));
  by("head").replaceChildren(...layers[state.layer].heads.map((head, index) => {
    const marks = isSink(run, first, state.step, columnOf(run, state.layer, index)) ? " · sink" : "";
    return option(index, head + marks);
  }));
  for (const name of ["statistic", "layer", "head", "range", "lines", "gap"]) by(name).value = state[name];
  by("of-run").value = state.run;
  by("earlier").disabled = state.step === 0;
  by("later").disabled = state.step === steps.length - 1;
  if (by("timeline")) by("timeline").style.setProperty("--now", `${across(chosenStep()).toFixed(2)}%`);
}

function setUp() {
  document.body.classList.toggle("several", runs.length > 1);
  by("of-run").append(...runs.map(({ label }, index) => option(index, label)));
  by("of-run").parentElement.hidden = runs.length === 1;
  by("main").style.setProperty("--wide", Math.ceil((PROGRESS.length + MAIN.length) / 2)); // two rows
  by("title-more").textContent = `${REST.length} more quantities, forward and backward, gain per layer`;
  for (const [phase, text] of Object.entries(PHASES)) {
    const group = document.createElement("optgroup");
    group.label = text;
    group.append(...page.quantities.filter((one) => one.phase === phase).map((one) => option(quantityKey(one), nameOf(one), one.explanation)));
    if (group.children.length) by("quantity").append(group);
  }
  by("gap").append(...gaps.map(({ name }) => option(name, name.replace("gap_count_", ""))));
  by("gap").parentElement.hidden = !gaps.length;
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("of-run").addEventListener("change", () => { switchRun(Number(by("of-run").value)); choose({}); });
  by("step").addEventListener("input", () => choose({ step: Number(by("step").value) }));
  by("earlier").addEventListener("click", () => choose({ step: Math.max(0, state.step - 1) }));
  by("later").addEventListener("click", () => choose({ step: Math.min(chosen().steps.length - 1, state.step + 1) }));
  by("quantity").addEventListener("change", () => {
    const quantity = page.quantities.find((one) => quantityKey(one) === by("quantity").value);
    choose({ quantity, statistic: quantity.shown });
  });
  for (const name of ["layer", "head"]) by(name).addEventListener("change", () => choose({ [name]: Number(by(name).value) }));
  for (const name of ["statistic", "range", "lines", "gap"]) by(name).addEventListener("change", () => choose({ [name]: by(name).value }));
  for (const name of ["table", "more"]) by(name).addEventListener("toggle", () => {
    const wanted = by(name).open ? "open" : "";
    if (wanted !== state[name]) choose({ [name]: wanted });
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

setUpVerdict();
setUp();
readAddress();
applyTheme();
render();
addEventListener("hashchange", () => { readAddress(); render(); });
darkness.addEventListener("change", render);
paper.addEventListener("change", render);
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(render); });
