// The page of an evaluation: theme, tooltips and heat maps of heads. The charts are static SVG.

const by = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"], MAPS = Object.keys(page.labels);
const state = { theme: "auto", policy: "", length: "", model: 0, cell: [0, 0] };
const maps = page.models.length ? MAPS.map((name) => [name, new HeatMap(by(`map-${name}`), `${page.labels[name]}, layer by head`)]) : [];

// --- heat maps of heads

function fill(id, values, chosen) {
  by(id).replaceChildren(...values.map(([value, text]) => {
    const made = document.createElement("option");
    Object.assign(made, { value, textContent: text });
    return made;
  }));
  by(id).value = chosen;
}

const numberOf = (planes, name, row, column) => {
  const heads = planes && planes[name] ? planes[name][row] : [];
  return column < heads.length ? heads[column] ?? NaN : undefined;
};

function drawMaps() {
  if (!maps.length) return;
  const model = page.models[state.model], planes = model.cells[`${state.policy} ${state.length}`], [row, column] = state.cell;
  const most = Math.max(...Object.values(model.cells).flatMap((cell) => cell.w_max.map((heads) => heads.length)));
  const where = `${model.layers[row]} · head ${column} · ${state.policy} at ${state.length} tokens`;
  const numbers = (r, c) => MAPS.map((name) => `${page.labels[name]} ${format(numberOf(planes, name, r, c))}`);
  by("readout").textContent = planes ? `${where}: ${numbers(row, column).join(", ")}` : "This combination was not measured.";
  for (const [name, map] of maps) {
    const every = Object.values(model.cells).flatMap((cell) => cell[name].map((heads) => heads.map((x) => x ?? NaN)));
    map.draw({
      rows: model.short,
      columns: Array.from({ length: most }, (_, head) => String(head)),
      value: (r, c) => numberOf(planes, name, r, c),
      marked: () => false,
      marks: false,
      domain: domainOf(name, every),
      selected: planes ? state.cell : [-1, -1],
      pick: (r, c) => { state.cell = [r, c]; render(); },
      words: (r, c) => [`${model.layers[r]} · head ${c}`, ...numbers(r, c)].join("\n"),
      across: "head",
      bar: page.labels[name],
    });
  }
}

function setUpMaps() {
  if (!maps.length) return;
  Object.assign(state, { policy: page.policies[0], length: String(page.lengths.at(-1)), cell: page.models[0].best });
  fill("map-policy", page.policies.map((name) => [name, name]), state.policy);
  fill("map-length", page.lengths.map((length) => [length, `${length} tokens`]), state.length);
  fill("map-model", page.models.map(({ name }, index) => [index, name]), 0);
  for (const name of ["policy", "length"]) {
    by(`map-${name}`).addEventListener("change", () => { state[name] = by(`map-${name}`).value; render(); });
  }
  by("map-model").addEventListener("change", () => {
    state.model = Number(by("map-model").value);
    state.cell = page.models[state.model].best;
    render();
  });
}

// --- head selector and chart tooltips

const which = by("which");
if (which) which.addEventListener("change", () => {
  for (const box of document.querySelectorAll("[data-which]")) box.hidden = box.dataset.which !== which.value;
});
for (const chart of document.querySelectorAll("svg.figure")) {
  chart.addEventListener("pointermove", (event) => {
    const found = event.target.closest("[data-tip]");
    if (found) tip.show(found.dataset.tip, event); else tip.hide();
  });
  chart.addEventListener("pointerleave", () => tip.hide());
}

// --- theme, resizing and printing

const darkness = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
let drawn = 0;
function render() {
  const dark = !paper.matches && (state.theme === "dark" || state.theme === "auto" && darkness.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  by("theme").textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[state.theme];
  drawMaps();
  document.documentElement.dataset.ready = String(++drawn);
}

function readAddress() {
  const theme = new URLSearchParams(location.hash.slice(1)).get("theme");
  if (THEMES.includes(theme)) state.theme = theme;
}

by("theme").addEventListener("click", () => {
  state.theme = THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length];
  render();
});
setUpMaps();
readAddress();
render();
addEventListener("hashchange", () => { readAddress(); render(); });
darkness.addEventListener("change", render);
paper.addEventListener("change", render);
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(render); });
