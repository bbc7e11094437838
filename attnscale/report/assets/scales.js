// Mapping of values to positions, colours and text.

const COLOURS = page.colours.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const GRADIENT = `linear-gradient(to right, ${COLOURS.map((rgb) => `rgb(${rgb})`).join(", ")})`;

function colour(share) {
  const place = Math.min(1, Math.max(0, share)) * (COLOURS.length - 1), left = Math.min(Math.floor(place), COLOURS.length - 2);
  return `rgb(${COLOURS[left].map((x, i) => Math.round(x + (place - left) * (COLOURS[left + 1][i] - x)))})`;
}

// Quantities between 0 and 1 always use the full range, so that plots are comparable.
const SHARES = new Set(page.quantities.filter(({ share }) => share).map(({ name }) => name));

const LOGS = new Set(page.quantities.filter(({ log }) => log).map(({ name }) => name));

// The range of an axis or colour bar: {low, high, log}; logarithmic if values differ by more than a factor of 100.
function domainOf(name, arrays) {
  if (SHARES.has(name)) return { low: 0, high: 1, log: false };
  let low = Infinity, high = -Infinity, positive = Infinity;
  for (const values of arrays) {
    for (const x of values) {
      if (!Number.isFinite(x)) continue;
      if (x < low) low = x;
      if (x > high) high = x;
      if (x > 0 && x < positive) positive = x;
    }
  }
  if (low > high) return { low: 0, high: 1, log: false, empty: true };
  const times = high / positive, wide = LOGS.has(name) && (low > 0 || times > 10) || times > 100;
  if (name !== "lr" && low >= 0 && high > 0 && wide) {
    if (high === low) return { low: high / 2, high: high * 2, log: true };
    return { low: low > 0 ? low : positive / 3, high, log: true }; // zeros lie below the smallest positive value
  }
  if (low === 0 && high === 0) return { low: 0, high: 1, log: false };
  if (low === high) return { low: low - (Math.abs(low) || 1) * 0.5, high: high + (Math.abs(high) || 1) * 0.5, log: false };
  return { low, high, log: false };
}

// Extends a domain to a limit near it; a distant one would flatten the curves.
function reaching(domain, limit) {
  const { low, high, log, empty } = domain;
  if (!limit || empty) return domain;
  const place = log ? Math.log(limit.value / low) / Math.log(high / low) : (limit.value - low) / (high - low);
  if (!limit.always && !(place > -0.5 && place < 1.5)) return domain;
  return { low: Math.min(low, limit.value), high: Math.max(high, limit.value), log };
}

// Adds a margin above and below the lines, within the valid range.
function padded(name, { low, high, log }) {
  if (SHARES.has(name)) return { low, high, log };
  if (log) return { low: low / 1.2, high: high * 1.2, log };
  const margin = (high - low) * 0.05;
  return { low: low >= 0 ? Math.max(0, low - margin) : low - margin, high: high + margin, log };
}

// Position of a value in its domain, 0 to 1; NaN stays NaN.
function shareOf(x, { low, high, log }) {
  if (Number.isNaN(x)) return NaN;
  if (log) return Math.min(1, Math.max(0, Math.log(Math.max(x, low) / low) / Math.log(high / low)));
  return Math.min(1, Math.max(0, (x - low) / (high - low)));
}

function ticksOf({ low, high, log }, wanted) {
  if (log) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / wanted)), found = [];
    for (let power = first; power <= last; power += every) found.push(Number(`1e${power}`));
    if (found.length > 1) return found;
    const within = (digits) => [first - 1, first].flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)))
      .filter((x) => x >= low && x <= high);
    return within([1, 2, 5]).length > 1 ? within([1, 2, 5]) : within([1, 1.5, 2, 3, 4, 5, 6, 7, 8]);
  }
  const rough = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((factor) => factor * size >= rough * 0.999), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function format(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(x.toPrecision(3)).toExponential().replace("e+", "e").replaceAll("-", "−");
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

function median(values) {
  const sorted = values.filter((x) => !Number.isNaN(x)).sort((a, b) => a - b), half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function mean(values) {
  const known = values.filter((x) => !Number.isNaN(x));
  return known.length ? known.reduce((sum, x) => sum + x, 0) / known.length : NaN;
}
