// Curves over steps: loss and learning rate, the main quantities, the selected quantity, all others, and both passes.

const STATISTICS = { mean: "mean", p10: "10 %", p50: "median", p90: "90 %", min: "minimum", max: "maximum", value: "–" };
const MAIN = page.quantities.filter(({ main }) => main !== null).sort((a, b) => a.main - b.main);
const REST = page.quantities.filter(({ main }) => main === null);
const gaps = page.quantities.filter(({ phase, name }) => phase === "forward" && name.startsWith("gap_count_"));
const PROGRESS = [
  { name: "loss", label: "loss", explanation: "training loss at the reports", term: "", limit: null },
  { name: "lr", label: "learning rate", explanation: "at the reports", term: "", limit: null },
].filter(({ name }) => runs.some((run) => run[name].some((x) => x !== null)));

const OF_SINKS = {
  first_share: "This head is an attention sink.",
  criticality: "Attention sink: r tells how clearly the first key wins, not whether a relevant key is found.",
};

const curve = new Chart(by("curve"), "curve over steps", 260);
const progress = PROGRESS.map((about) => panel(by("main"), about, ""));
const main = MAIN.map((quantity) => panel(by("main"), quantity, quantityKey(quantity)));
const rest = REST.map((quantity) => panel(by("rest"), quantity, quantityKey(quantity)));
const both = ["w_max", "entropy", "gap", "mismatch"].map((name) => titled(by("both"), name, (host) => new Chart(host, name, 190)));
const gainDots = titled(by("gain"), "gain-layers", (host) => new Chart(host, "gain by layer", 240));
const gainMap = titled(by("gain"), "gain-steps", (host) => new HeatMap(host, "gain, layer by step"));

// A small chart with its name, which selects the quantity, and an explanation.
function panel(host, quantity, key) {
  const made = titled(host, `of-${quantity.name}-${quantity.phase || ""}`, (inner) => new Chart(inner, quantity.label, 160));
  const over = quantity.shown && quantity.shown !== "mean" && quantity.shown !== "value" ? `${STATISTICS[quantity.shown]} over rows; ` : "";
  made.heading.append(key ? button("link", () => choose({ quantity, statistic: quantity.shown }), nameOf(quantity)) : quantity.label);
  made.heading.title = quantity.term || quantity.explanation;
  made.about = over + quantity.explanation;
  made.hint = element("p", "hint", made.about);
  made.heading.after(made.hint);
  return made;
}

function drawOverSteps(chart, name, series, limit = null) {
  const run = chosen(), arrays = series.flatMap(({ values, low, high }) => low ? [values, low, high] : [values]);
  const events = runs.length > 1 ? [] : eventsOf(run, state.layer, state.head);
  chart.draw({
    x: run.steps, extent: EXTENT, now: state.step, series, limit, across: "step", tick: String,
    domain: padded(name, reaching(domainOf(name, arrays), limit)),
    spans: events.map(({ start, end, severity }) => [Math.max(start, EXTENT[0]), end === null ? lastStep(run) : end, severity]),
    head: (index) => `step ${run.steps[index]}`, pick: (step) => choose({ step }),
  });
}

// One line per run for the selected head; with one run, also the band of its rows.
function headSeries(planes) {
  return runs.map((run, index) => {
    const { column } = located(run), [centre, low, high] = planes[index];
    const one = {
      label: runs.length > 1 ? run.label : headName(), x: run.steps, values: overSteps(run, centre, column),
      colour: runs.length > 1 ? colourOf(index) : variable("--accent"),
    };
    if (runs.length > 1 || !low || !high) return one;
    return { ...one, low: overSteps(run, low, column), high: overSteps(run, high, column), shade: variable("--band") };
  });
}

const headName = () => `head ${chosen().layers[state.layer].heads[state.head]}`;

// Loads the shown statistic and the band of quantities, for each run.
const loadPanels = (quantities) => Promise.all(quantities.map(({ phase, name, shown }) => Promise.all(runs.map((run) =>
  Promise.all([shown, "p10", "p90"].map((statistic) => plane(run, phase, name, statistic)))))));

function drawMain(loaded, data) {
  const sink = isSink(chosen(), data[state.run].first, state.step, located(chosen()).column);
  by("title-main").textContent = `${chosen().layers[state.layer].name} · ${headName()}`;
  const lines = runs.length > 1 ? "One line per run, in the colour of its verdict" : "Line: this head. Band: 10–90 % of its rows. Shaded: an event of this head";
  by("hint-main").textContent = `${lines}. Dashed: limit. Hover over a name for its meaning; click it to show the quantity in the maps below.`;
  PROGRESS.forEach(({ name }, place) => drawOverSteps(progress[place].plot, name, runs.map((run, index) => ({
    label: runs.length > 1 ? run.label : name, x: run.steps, values: run[name].map((x) => x === null ? NaN : Number(x)),
    colour: runs.length > 1 ? colourOf(index) : variable("--text"),
  }))));
  MAIN.forEach((quantity, place) => {
    const note = sink && OF_SINKS[quantity.name];
    main[place].hint.textContent = note || main[place].about;
    main[place].hint.classList.toggle("note", Boolean(note));
    drawOverSteps(main[place].plot, quantity.name, headSeries(loaded[place]), quantity.limit);
  });
}

function drawRest(loaded) {
  REST.forEach((quantity, place) => drawOverSteps(rest[place].plot, quantity.name, headSeries(loaded[place]), quantity.limit));
}

function drawCurve(data) {
  const own = chosen().layers[state.layer], alone = runs.length === 1;
  let series = [];
  if (state.lines === "head") {
    series = headSeries(data.map(({ values, low, high }) => [values, low, high]));
    series.forEach((one, index) => { one.legend = alone ? `${own.name}, ${headName()}` : runs[index].label; });
  } else {
    runs.forEach((run, index) => {
      const { layer, head } = located(run), { values } = data[index];
      const made = state.lines === "heads" ? headLines(run, values, layer, head, alone) : layerLines(run, values, layer, alone);
      if (!alone) made.forEach((one, place) => Object.assign(one, {
        x: run.steps, colour: colourOf(index), label: `${run.label}, ${one.label}`, legend: place ? "" : run.label,
      }));
      series.push(...made);
    });
  }
  const which = state.statistic === "value" ? "" : `, ${STATISTICS[state.statistic]} over rows`;
  by("hint-curve").textContent = `${sentence(nameOf(state.quantity))}${which}. Click or use the arrow keys to select a step.`;
  const comparable = [state.quantity.shown, "mean"].includes(state.statistic);
  drawOverSteps(curve, state.quantity.name, series, comparable ? state.quantity.limit : null);
}

function headLines(run, values, layer, head, alone) {
  if (layer < 0) return [];
  const { heads, name } = run.layers[layer];
  const made = heads.map((number, other) => ({
    label: `head ${number}`, values: overSteps(run, values, columnOf(run, layer, other)),
    colour: variable(other === head && alone ? "--accent" : "--muted"), faint: other !== head,
    legend: other === head ? `head ${number}; grey: the others of ${name}` : "",
  }));
  return [...made.filter((_, other) => other !== head), ...made.slice(head, head + 1)];
}

function layerLines(run, values, layer) {
  // Colours that contrast with the background of either theme.
  const many = run.layers.length - 1 || 1, darkest = document.documentElement.dataset.theme === "dark" ? 0.35 : 0.05;
  return run.layers.map(({ name, short }, other) => ({
    label: short, legend: run.layers.length <= 8 || other === 0 || other === many || other === layer ? name : "",
    values: perLayer(run, values, mean)[other], colour: colour(darkest + 0.65 * other / many), faint: other !== layer,
  }));
}

// --- both passes and the gain of the selected run

function drawBoth(pairs, mismatch) {
  const run = chosen(), { column } = located(run), { name, heads } = run.layers[state.layer];
  ["w_max", "entropy", state.gap].forEach((quantity, index) => {
    const [forward, backward] = pairs[index], series = [];
    if (forward) series.push({ label: "forward", legend: "forward", values: overSteps(run, forward, column), colour: variable("--accent") });
    if (backward) {
      series.push({ label: "backward", legend: "backward", values: overSteps(run, backward, column), colour: variable("--second"), dash: "5 4" });
    }
    both[index].heading.textContent = (page.quantities.find(({ name }) => name === quantity) || { title: quantity }).title;
    drawOverSteps(both[index].plot, quantity, series);
  });
  both[3].heading.textContent = "largest difference of any row";
  drawOverSteps(both[3].plot, "mismatch", [{ label: "mismatch", values: overSteps(run, mismatch, column), colour: variable("--second") }]);
  let worst = 0, where = -1;
  for (let i = 0; mismatch && i < mismatch.length; i++) if (mismatch[i] > worst) [worst, where] = [mismatch[i], i];
  const verdict = !mismatch ? "This run has no backward records." : where < 0
    ? "Forward and backward agree in every head at every step."
    : `The largest difference of the run is ${format(worst)}, in ${describe(run, where)}.`;
  by("hint-both").textContent = `${name} · head ${heads[state.head]}: the same rows in the forward pass and recomputed in the backward pass. ${verdict}`;
}

function describe(run, index) {
  const { layer, head } = run.columns[index % run.columns.length], { name, heads } = run.layers[layer];
  return `${name}, head ${heads[head]}, step ${run.steps[Math.floor(index / run.columns.length)]}`;
}

function drawGain(gain) {
  const run = chosen(), { step } = state, medians = perLayer(run, gain, median);
  gainDots.heading.textContent = `At step ${run.steps[step]}`;
  gainMap.heading.textContent = "Layer × step, median over heads";
  const most = Math.max(...run.layers.map(({ heads }) => heads.length)), series = [];
  for (let head = 0; gain && head < most; head++) {
    const values = run.layers.map(({ heads }, layer) => head < heads.length ? at(run, gain, step, columnOf(run, layer, head)) : NaN);
    series.push({ label: `head ${head}`, legend: head === 0 ? "one head" : "", values, colour: variable("--accent"), dots: true });
  }
  const middle = (index) => medians.map((steps) => steps[index]);
  if (gain && step > 0) {
    series.push({ label: `median at step ${run.steps[0]}`, legend: `median at step ${run.steps[0]}`, values: middle(0), colour: variable("--muted"), dash: "5 4" });
  }
  series.push({ label: "median", legend: "median over heads", values: middle(step), colour: variable("--text") });
  gainDots.plot.draw({
    x: run.layers.map((_, layer) => layer), now: state.layer, series, across: "layer",
    domain: padded("gain", domainOf("gain", series.map(({ values }) => values))),
    tick: (layer) => run.layers.length <= 8 ? run.layers[layer].short : String(layer),
    head: (layer) => `${run.layers[layer].name} · step ${run.steps[step]}`,
    pick: (layer) => choose({ layer }),
  });
  drawLayerSteps(gainMap.plot, run, "gain", medians, domainOf("gain", medians));
}
