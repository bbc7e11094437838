// SVG chart of lines with bands, or of dots, over steps or layers. Arrow keys move the selection.

const SPACE = document.getElementById("seed").namespaceURI;

function shape(name, attributes, text) {
  const node = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function indexNearest(values, wanted) {
  let best = 0;
  values.forEach((value, index) => {
    if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index;
  });
  return best;
}

class Chart extends Plot {
  constructor(host, label, height) {
    const svg = shape("svg", { class: "chart" });
    super(host, svg, "chart", label, "left and right arrow keys move the selection");
    this.svg = svg;
    this.height = height;
  }

  // options: x (ascending numbers), now (index in x), pick(index), domain, across, tick(x), head(index), extent ([first,
  // last] of the axis), limit {value, text}, spans [[from, to, severity]] and series: [{label, x, values, low, high,
  // colour, dash, faint, dots}]; a series may have an x of its own; dots draws points without a line
  draw(options) {
    this.options = options;
    const width = Math.max(140, this.host.clientWidth), { height } = this, { x, series, domain } = options;
    const labels = ticksOf(domain, Math.max(2, Math.floor(height / 48)));
    const left = 12 + 6.4 * Math.max(3, ...labels.map((value) => format(value).length));
    this.area = { left, right: width - 10, top: 10, bottom: height - 34 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const { right, top, bottom } = this.area;
    for (const [from, to, severity] of options.spans || []) {
      const start = this.x(from), width = Math.max(2, this.x(to) - start);
      this.svg.append(shape("rect", { class: `span ${severity}`, x: start, width, y: top, height: bottom - top }));
    }
    for (const value of labels) {
      const y = this.y(value);
      this.svg.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      this.svg.append(shape("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, format(value)));
    }
    this.svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    this.ticksAcross(width);
    this.svg.append(shape("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, options.across));
    if (!series.some(({ values }) => values.some((value) => Number.isFinite(value)))) {
      const middle = { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" };
      this.svg.append(shape("text", middle, "nothing recorded"));
    }
    for (const one of series) this.band(one);
    for (const one of series) this.curve(one);
    this.limit(options.limit);
    if (x.length) this.line("now", this.x(x[options.now]));
    this.describe(series);
  }

  limit(limit) {
    const { left, right } = this.area, { low, high } = this.options.domain;
    if (!limit || limit.value < low || limit.value > high) return;
    const y = this.y(limit.value), below = y < this.area.top + 14;
    this.svg.append(shape("line", { class: "limit", x1: left, x2: right, y1: y, y2: y }));
    this.svg.append(shape("text", { class: "limit", x: left + 4, y: y + (below ? 12 : -4) }, limit.text));
  }

  extent() { const { x, extent } = this.options; return extent || [x[0], x[x.length - 1]]; }

  x(value) {
    const [first, last] = this.extent(), { left, right } = this.area;
    return last > first ? left + (value - first) / (last - first) * (right - left) : (left + right) / 2;
  }

  y(value) {
    const { top, bottom } = this.area;
    return bottom - shareOf(value, this.options.domain) * (bottom - top);
  }

  ticksAcross(width) {
    const { tick } = this.options, [low, high] = this.extent(), y = this.area.bottom + 14;
    const wanted = Math.max(3, Math.floor(width / 90));
    const places = high > low ? ticksOf({ low, high, log: false }, wanted).filter(Number.isInteger) : [low];
    for (const place of places) {
      // Labels at the edge are aligned inwards to avoid clipping.
      const text = tick(place), half = 3.2 * text.length, at = this.x(place);
      const anchor = at + half > width ? "end" : at - half < 0 ? "start" : "middle";
      const edge = { end: width - 1, start: 1, middle: at }[anchor];
      this.svg.append(shape("text", { x: edge, y, "text-anchor": anchor }, text));
    }
  }

  // Contiguous runs of points, split at NaN.
  pieces(values, x = this.options.x) {
    const found = [[]];
    x.forEach((place, index) => {
      if (Number.isNaN(values[index])) found.push([]);
      else found[found.length - 1].push([this.x(place).toFixed(1), this.y(values[index]).toFixed(1)]);
    });
    return found.filter((piece) => piece.length);
  }

  band({ x, low, high, shade }) {
    if (!low || !high) return;
    const upper = this.pieces(high, x), lower = this.pieces(low, x);
    upper.forEach((piece, index) => {
      if (!lower[index]) return;
      const points = [...piece, ...lower[index].slice().reverse()].map((point) => point.join(",")).join(" ");
      this.svg.append(shape("polygon", { class: "band", points, fill: shade }));
    });
  }

  curve({ x, values, colour: stroke, dash, faint, dots, label }) {
    const style = { stroke, "stroke-width": faint ? 1 : 2, "stroke-dasharray": dash || "none", opacity: faint ? 0.75 : 1 };
    for (const piece of this.pieces(values, x)) {
      if (dots || piece.length === 1) {
        for (const [cx, cy] of piece) this.svg.append(shape("circle", { cx, cy, r: dots ? 2.5 : 3, fill: stroke, opacity: dots ? 0.6 : 1 }));
        continue;
      }
      const points = piece.map((point) => point.join(",")).join(" ");
      this.svg.append(shape("polyline", { class: "line", points, fill: "none", "data-label": label, ...style }));
    }
  }

  line(name, place) {
    const { top, bottom } = this.area;
    let node = this.svg.querySelector(`.${name}`);
    if (node) node.remove();
    if (place === null) return;
    node = shape("line", { class: name, x1: place, x2: place, y1: top, y2: bottom });
    if (name === "hover") node.setAttribute("stroke", variable("--muted"));
    this.svg.append(node);
  }

  describe(series) {
    const { limit, domain: { low: bottom, high: top } } = this.options;
    const parts = series.filter(({ legend }) => legend).flatMap(({ legend, colour: stroke, dash, dots, shade, low }) => {
      const line = [legend, `border-top-color: ${stroke}; border-top-style: ${dash ? "dashed" : "solid"}`, ""];
      const made = [dots ? [legend, `background: ${stroke}`, "dot"] : line];
      if (low) made.push(["10–90 % of rows", `background: ${shade}`, "area"]);
      return made;
    });
    if (limit && !(limit.value >= bottom && limit.value <= top)) {
      parts.push([`${limit.text} (off this scale)`, "border-top-color: var(--alarm); border-top-style: dashed", ""]);
    }
    this.legend.replaceChildren(...parts.map(([text, style, kind]) => {
      const item = document.createElement("span"), sign = document.createElement("i");
      sign.style.cssText = style;
      sign.className = kind;
      item.append(sign, text);
      return item;
    }));
  }

  nearest(event) {
    const box = this.svg.getBoundingClientRect(), { x } = this.options;
    const scale = this.svg.viewBox.baseVal.width / box.width, place = (event.clientX - box.left) * scale;
    return indexNearest(x.map((value) => this.x(value)), place);
  }

  click(event) { this.options.pick(this.nearest(event)); }

  leave() {
    super.leave();
    this.line("hover", null);
  }

  // All lines if there are few, else the nearest to the pointer.
  hover(event) {
    const chosen = this.nearest(event), { series, head, x } = this.options;
    const height = (event.clientY - this.svg.getBoundingClientRect().top);
    const own = (one) => one.x && one.x !== x ? indexNearest(one.x, x[chosen]) : chosen;
    const distance = (one) => Math.abs(this.y(one.values[own(one)]) - height);
    const near = series.filter((one) => !Number.isNaN(one.values[own(one)])).sort((a, b) => distance(a) - distance(b));
    const shown = series.length > 6 ? near.slice(0, 5) : series;
    const lines = shown.map((one) => {
      const { label, values, low, high } = one, index = own(one);
      const spread = low && high ? ` (10–90 %: ${format(low[index])} to ${format(high[index])})` : "";
      return `${label}: ${format(values[index])}${spread}`;
    });
    tip.show([head(chosen), ...lines].join("\n"), event);
    this.line("hover", this.x(x[chosen]));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], { x, now, pick } = this.options;
    if (move === undefined && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const target = event.key === "Home" ? 0 : event.key === "End" ? x.length - 1 : now + move;
    if (target >= 0 && target < x.length) pick(target);
  }
}
