// The planes of a run: values [steps, columns]; a column is one head. Planes are decoded on first use.

const columns = run.layers.flatMap((layer, index) => layer.heads.map((head) => ({ layer: index, head })));
const firstColumn = [];
for (let index = 0, sum = 0; index < run.layers.length; sum += run.layers[index++].heads.length) firstColumn.push(sum);

const texts = document.querySelectorAll("script.plane");
const unpacked = new Map();

function planeIndex(phase, name, statistic) {
  return run.planes.findIndex((p) => p.phase === phase && p.name === name && p.statistic === statistic);
}

// The values of a plane, or null if the run does not have it.
function plane(phase, name, statistic) {
  const index = planeIndex(phase, name, statistic);
  if (index < 0) return Promise.resolve(null);
  if (!unpacked.has(index)) unpacked.set(index, toNumbers(index));
  return unpacked.get(index);
}

// The alert bits, stored after the planes.
function alertBits() {
  if (!unpacked.has("alerts")) unpacked.set("alerts", toIntegers(run.planes.length, 1));
  return unpacked.get("alerts");
}

async function inflate(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Inverse of `pack` in page.py: lowest bytes of all values first; values of fewer than four bytes are differences between steps.
async function toIntegers(index, width) {
  const bytes = await inflate(texts[index].textContent);
  const wide = columns.length, count = run.steps.length * wide, found = new Uint32Array(count);
  for (let byte = 0; byte < width; byte++) {
    for (let i = 0; i < count; i++) found[i] |= bytes[byte * count + i] << (8 * byte);
  }
  if (width < 4) {
    const mask = 256 ** width - 1;
    for (let i = wide; i < count; i++) found[i] = (found[i] + found[i - wide]) & mask;
  }
  const { base } = run.planes[index] || { base: null };
  if (base !== null) {
    const other = await toIntegers(base, width);
    for (let i = 0; i < count; i++) found[i] ^= other[i];
  }
  return found;
}

async function toNumbers(index) {
  const { width, low, high, powers } = run.planes[index];
  const integers = await toIntegers(index, width);
  if (width === 4) return new Float32Array(integers.buffer);
  const special = [NaN, -Infinity, Infinity], top = 256 ** width - 1 - special.length;
  return Float32Array.from(integers, (level) => {
    if (level < special.length) return special[level];
    const share = (level - special.length) / top;
    return powers ? low * (high / low) ** share : low + share * (high - low);
  });
}
