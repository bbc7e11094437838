// The planes of each run: values [steps, columns]; a column is one head. Planes are decoded on first use.

const runs = page.runs, texts = document.querySelectorAll("script.plane");
let textCount = 0, columnCount = 0;
for (const run of runs) {
  run.columns = run.layers.flatMap((layer, index) => layer.heads.map((_, head) => ({ layer: index, head })));
  run.firstColumn = [];
  columnCount = 0;
  for (const { heads } of run.layers) {
    run.firstColumn.push(columnCount);
    columnCount += heads.length;
  }
  run.firstText = textCount;
  textCount += run.planes.length;
  run.unpacked = new Map();
}

// The values of a plane, or null if the run does not have it.
function plane(run, phase, name, statistic) {
  const index = run.planes.findIndex((p) => p.phase === phase && p.name === name && p.statistic === statistic);
  if (index < 0) return Promise.resolve(null);
  if (!run.unpacked.has(index)) run.unpacked.set(index, toNumbers(run, index));
  return run.unpacked.get(index);
}

async function inflate(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Inverse of `pack` in encoding.py: lowest bytes of all values first; values of fewer than four bytes are differences between steps.
async function toIntegers(run, index) {
  const { width, base } = run.planes[index], bytes = await inflate(texts[run.firstText + index].textContent);
  const wide = run.columns.length, count = run.steps.length * wide, found = new Uint32Array(count);
  for (let byte = 0; byte < width; byte++) {
    for (let i = 0; i < count; i++) found[i] |= bytes[byte * count + i] << (8 * byte);
  }
  if (width < 4) {
    const mask = 256 ** width - 1;
    for (let i = wide; i < count; i++) found[i] = (found[i] + found[i - wide]) & mask;
  }
  if (base !== null) {
    const other = await toIntegers(run, base);
    for (let i = 0; i < count; i++) found[i] ^= other[i];
  }
  return found;
}

async function toNumbers(run, index) {
  const { width, low, high, powers } = run.planes[index];
  const integers = await toIntegers(run, index);
  if (width === 4) return new Float32Array(integers.buffer);
  const special = [NaN, -Infinity, Infinity], top = 256 ** width - 1 - special.length;
  return Float32Array.from(integers, (level) => {
    if (level < special.length) return special[level];
    const share = (level - special.length) / top;
    return powers ? low * (high / low) ** share : low + share * (high - low);
  });
}

// --- values of a plane; NaN for a missing plane or column

const at = (run, values, step, column) => values && column >= 0 ? values[step * run.columns.length + column] : NaN;
const columnOf = (run, layer, head) => run.firstColumn[layer] + head;
const overSteps = (run, values, column) => run.steps.map((_, step) => at(run, values, step, column));
const headsOf = (run, values, step, layer) => run.layers[layer].heads.map((_, head) => at(run, values, step, columnOf(run, layer, head)));

// Aggregates the heads of each layer and step; cached, since the result does not depend on the selection.
const joined = new WeakMap();
function perLayer(run, values, join) {
  if (!values) return run.layers.map(() => run.steps.map(() => NaN));
  if (!joined.has(values)) joined.set(values, new Map());
  const known = joined.get(values);
  if (!known.has(join)) known.set(join, run.layers.map((_, layer) => run.steps.map((_, step) => join(headsOf(run, values, step, layer)))));
  return known.get(join);
}

// --- events

// The events of a head at a step, or, without a step, at any step.
function eventsOf(run, layer, head, step = null) {
  const number = run.layers[layer].heads[head];
  return run.events.filter(({ start, end, places, everywhere }) => {
    if (step !== null && (step < start || end !== null && step >= end)) return false;
    return everywhere || places.some(([place, heads]) => place === layer && (!heads.length || heads.includes(number)));
  });
}
