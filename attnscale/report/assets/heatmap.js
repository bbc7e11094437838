// Heat map on a canvas: rows are layers. Arrow keys move the selected cell.

class HeatMap extends Plot {
  constructor(host, label) {
    const canvas = document.createElement("canvas");
    super(host, canvas, "heat map", label, "arrow keys move the selection");
    this.canvas = canvas;
  }

  // options: rows and columns (labels), value(row, column), domain, selected [row, column], marked and ringed (row, column),
  // pick(row, column), words(row, column), across (column axis label), bar (colour bar label)
  draw(options) {
    this.options = options;
    const { rows, columns, domain, selected } = options, ratio = devicePixelRatio || 1;
    const context = this.canvas.getContext("2d"), font = "11px system-ui, sans-serif";
    context.font = font;
    const width = Math.max(120, this.host.clientWidth);
    const widest = Math.max(...rows.map((row) => context.measureText(row).width));
    this.left = Math.ceil(Math.min(widest, width * 0.32)) + 8;
    this.rowHeight = Math.max(12, Math.min(30, Math.floor(330 / rows.length)));
    this.cellWidth = (width - this.left - 2) / columns.length;
    const bottom = rows.length * this.rowHeight + 1, height = bottom + 34;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    context.scale(ratio, ratio);
    context.font = font;
    context.textBaseline = "middle";
    const text = variable("--quiet"), none = variable("--none"), alarm = variable("--alarm"), gap = this.cellWidth > 14 ? 1 : 0;

    rows.forEach((row, r) => {
      context.fillStyle = r === selected[0] ? variable("--text") : text;
      context.textAlign = "right";
      context.fillText(this.fitted(context, row), this.left - 6, (r + 0.5) * this.rowHeight + 0.5);
      columns.forEach((_, c) => {
        const value = options.value(r, c);
        if (value === undefined) return; // this layer has fewer heads
        const x = this.left + Math.floor(c * this.cellWidth), end = this.left + Math.floor((c + 1) * this.cellWidth);
        const share = shareOf(value, domain);
        context.fillStyle = Number.isNaN(share) ? none : colour(share);
        context.fillRect(x, r * this.rowHeight, end - x - gap, this.rowHeight - 1);
        if (Number.isNaN(share) && this.cellWidth > 9) this.cross(context, x, end, r, text);
        if (options.ringed && options.ringed(r, c)) this.ring(context, x, end - gap, r);
        if (options.marked(r, c)) this.mark(context, x, end - gap, r * this.rowHeight, alarm);
      });
    });
    this.axis(context, columns, bottom, text, width);
    this.frame(context, selected);
    this.describe(options);
  }

  fitted(context, label) {
    while (label.length > 4 && context.measureText(label).width > this.left - 8) label = `…${label.slice(2)}`;
    return label;
  }

  // An attention sink: a ring visible on every colour.
  ring(context, left, right, r) {
    for (const [stroke, thick] of [["#000", 2.5], ["#fff", 1.2]]) {
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.beginPath();
      context.arc((left + right) / 2, (r + 0.5) * this.rowHeight - 0.5, Math.max(2, Math.min(4, (right - left) / 4)), 0, 7);
      context.stroke();
    }
  }

  // An event: a red corner with an outline visible on every colour; in narrow cells a red underline.
  mark(context, left, right, top, fill) {
    context.fillStyle = fill;
    if (right - left < 14) {
      context.fillRect(left, top + this.rowHeight - 3, right - left + 1, 2);
      return;
    }
    const size = Math.min(9, this.rowHeight * 0.6);
    context.beginPath();
    context.moveTo(right - size, top);
    context.lineTo(right, top);
    context.lineTo(right, top + size);
    context.closePath();
    context.fill();
    context.strokeStyle = "#fff";
    context.lineWidth = 1;
    context.stroke();
  }

  cross(context, x, end, r, stroke) {
    const middle = (x + end) / 2, centre = (r + 0.5) * this.rowHeight, size = 2.5;
    context.strokeStyle = stroke;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(middle - size, centre - size);
    context.lineTo(middle + size, centre + size);
    context.moveTo(middle + size, centre - size);
    context.lineTo(middle - size, centre + size);
    context.stroke();
  }

  axis(context, columns, bottom, fill, width) {
    context.fillStyle = fill;
    context.textAlign = "center";
    const room = Math.max(...columns.map((label) => context.measureText(label).width)) + 10;
    const every = Math.max(1, Math.ceil(room / this.cellWidth));
    columns.forEach((label, c) => {
      if (c % every) return;
      const half = context.measureText(label).width / 2, middle = this.left + (c + 0.5) * this.cellWidth;
      context.fillText(label, Math.min(middle, width - half), bottom + 8);
    });
    context.fillText(this.options.across, this.left + (width - this.left) / 2, bottom + 24);
  }

  frame(context, [r, c]) {
    if (r < 0 || c < 0) return;
    const x = this.left + Math.floor(c * this.cellWidth), end = this.left + Math.floor((c + 1) * this.cellWidth);
    const width = Math.max(3, end - x);
    for (const [stroke, thick] of [["#000", 4], ["#fff", 2]]) {
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.strokeRect(x - 0.5, r * this.rowHeight - 0.5 + 1, width, this.rowHeight - 2);
    }
  }

  describe({ domain, bar, marks, rings }) {
    const ramp = document.createElement("i");
    ramp.className = "area";
    ramp.style.cssText = `width: 110px; margin: 0 6px; background: ${GRADIENT}`;
    const scale = document.createElement("span");
    scale.append(format(domain.low), ramp, format(domain.high), ` ${bar}${domain.log ? " (log scale)" : ""}`);
    const parts = [scale];
    if (marks) {
      const corner = document.createElement("span"), sign = document.createElement("span");
      sign.textContent = this.cellWidth < 15 ? "▁ " : "◥ ";
      sign.style.color = "var(--alarm)";
      corner.append(sign, marks);
      parts.push(corner);
    }
    if (rings) {
      const circle = document.createElement("span");
      circle.textContent = `○ ${rings}`;
      parts.push(circle);
    }
    this.legend.replaceChildren(...parts);
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top) / this.rowHeight);
    const c = Math.floor((event.clientX - box.left - this.left) / this.cellWidth);
    const { rows, columns, value } = this.options;
    return r >= 0 && r < rows.length && c >= 0 && c < columns.length && value(r, c) !== undefined ? [r, c] : null;
  }

  click(event) {
    const cell = this.cellAt(event);
    if (cell) this.options.pick(...cell);
  }

  hover(event) {
    const cell = this.options && this.cellAt(event);
    if (cell) tip.show(this.options.words(...cell), event); else tip.hide();
  }

  key(event) {
    const { rows, columns, selected: [r, c], pick, value } = this.options;
    const target = {
      ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1],
      Home: [r, 0], End: [r, columns.length - 1], PageUp: [0, c], PageDown: [rows.length - 1, c],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    if (target[0] < 0 || target[0] >= rows.length || target[1] < 0 || target[1] >= columns.length) return;
    if (value(...target) !== undefined) pick(...target);
  }
}
