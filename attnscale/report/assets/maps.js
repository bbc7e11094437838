// Heat maps of layer × head and layer × step, one per run, and the table of a step.

const maps = {
  heads: runs.map((run, index) => titled(by("heads"), `heads-${index}`, (host) => new HeatMap(host, "layer by head"))),
  steps: runs.map((run, index) => titled(by("steps"), `steps-${index}`, (host) => new HeatMap(host, "layer by step"))),
};
const quantityKey = ({ phase, name }) => `${phase}.${name}`;
const nameOf = (quantity) => quantity.label + (quantity.phase === "backward" ? " (backward)" : "");

// A plot with a heading.
function titled(host, id, make) {
  const box = document.createElement("div"), heading = document.createElement("h3"), inner = document.createElement("div");
  box.id = `plot-${id}`;
  box.append(heading, inner);
  host.append(box);
  return { box, heading, plot: make(inner) };
}

const titlesOf = (events) => [...new Set(events.map(({ title }) => title))].join(", ");
const isSink = (run, first, step, column) => at(run, first, step, column) > page.sink;

function drawHeads(data) {
  by("hint-heads").textContent = `${sentence(nameOf(state.quantity))} at step ${chosenStep()}. Click a cell or use the arrow keys to select it.`;
  const step = (index) => indexNearest(runs[index].steps, chosenStep());
  const shown = data.map(({ values }, index) => !values || state.range === "run" ? values || []
    : values.subarray(step(index) * runs[index].columns.length, (step(index) + 1) * runs[index].columns.length));
  const domain = domainOf(state.range === "run" ? state.quantity.name : "", shown);
  const most = Math.max(...runs.flatMap(({ layers }) => layers.map(({ heads }) => heads.length)));
  runs.forEach((run, index) => {
    const { values, low, high, first } = data[index], now = step(index), { layer: ownLayer, head: ownHead } = located(run);
    const inside = (layer, head) => head < run.layers[layer].heads.length;
    maps.heads[index].heading.textContent = runs.length > 1 ? run.label : "";
    maps.heads[index].plot.draw({
      rows: run.layers.map(({ short }) => short),
      columns: Array.from({ length: most }, (_, head) => String(head)),
      value: (layer, head) => inside(layer, head) ? at(run, values, now, columnOf(run, layer, head)) : undefined,
      marked: (layer, head) => inside(layer, head) && eventsOf(run, layer, head, run.steps[now]).length > 0,
      ringed: (layer, head) => inside(layer, head) && isSink(run, first, now, columnOf(run, layer, head)),
      marks: run.events.length ? "event at this step" : "",
      rings: first ? "attention sink" : "",
      domain,
      selected: [ownLayer, ownHead],
      pick: (layer, head) => choose({ run: index, layer, head, step: now }),
      words: (layer, head) => {
        const column = columnOf(run, layer, head), events = eventsOf(run, layer, head, run.steps[now]);
        return [
          `${run.layers[layer].name} · head ${run.layers[layer].heads[head]} · step ${run.steps[now]}`,
          `${nameOf(state.quantity)}: ${format(at(run, values, now, column))}`,
          ...(low && high ? [`10–90 % of rows: ${format(at(run, low, now, column))} to ${format(at(run, high, now, column))}`] : []),
          ...(isSink(run, first, now, column) ? ["attention sink"] : []),
          ...(events.length ? [`event: ${titlesOf(events)}`] : []),
        ].join("\n");
      },
      across: "head",
      bar: state.quantity.label,
    });
  });
}

// Heat map of layer × step.
function drawLayerSteps(map, run, text, numbers, domain) {
  const reports = new Map(run.layers.map((_, layer) => [layer, run.steps.map((step) => new Set(
    run.events.filter(({ start, end, places, everywhere }) => step >= start && (end === null || step < end)
      && (everywhere || places.some(([place]) => place === layer)))))]));
  map.draw({
    rows: run.layers.map(({ short }) => short),
    columns: run.steps.map(String),
    value: (layer, step) => numbers[layer][step],
    marked: (layer, step) => reports.get(layer)[step].size > 0,
    marks: run.events.length ? "event" : "",
    domain,
    selected: [located(run).layer, indexNearest(run.steps, chosenStep())],
    pick: (layer, step) => choose({ run: runs.indexOf(run), layer, step }),
    words: (layer, step) => [
      `${run.layers[layer].name} · step ${run.steps[step]}`,
      `${text}: ${format(numbers[layer][step])}`,
      ...(reports.get(layer)[step].size ? [`event: ${titlesOf([...reports.get(layer)[step]])}`] : []),
    ].join("\n"),
    across: "step",
    bar: text,
  });
}

function drawSteps(data) {
  by("hint-steps").textContent = `${sentence(nameOf(state.quantity))}, mean over heads: location and onset of changes.`;
  const numbers = runs.map((run, index) => perLayer(run, data[index].values, mean));
  const domain = domainOf(state.quantity.name, numbers.flat());
  runs.forEach((run, index) => {
    maps.steps[index].heading.textContent = runs.length > 1 ? run.label : "";
    drawLayerSteps(maps.steps[index].plot, run, state.quantity.label, numbers[index], domain);
  });
}

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
  const box = by("table"), run = chosen();
  box.open = state.table === "open";
  if (!box.open) return;
  const most = Math.max(...run.layers.map(({ heads }) => heads.length)), table = document.createElement("table");
  table.append(row([["layer"], ...Array.from({ length: most }, (_, head) => [`head ${head}`, "number"])], "th"));
  run.layers.forEach(({ name }, layer) => {
    table.append(row([[name], ...headsOf(run, values, state.step, layer).map((x) => [format(x), "number"])], "td"));
  });
  box.querySelector("div").replaceChildren(table);
}
