// Base of heat maps and charts: a node with pointer and keyboard events, a legend below it, and a tooltip.

// One tooltip for the whole page.
const tip = {
  box: document.getElementById("tip"),
  show(text, event) {
    this.box.textContent = text;
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    this.box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    const below = event.clientY + 16;
    this.box.style.top = `${below + height > innerHeight ? Math.max(4, event.clientY - height - 10) : below}px`;
  },
  hide() { this.box.hidden = true; },
};

function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

class Plot {
  // kind: "heat map" or "chart"; label: plotted quantity; keys: description of the keys
  constructor(host, node, kind, label, keys) {
    this.host = host;
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    host.replaceChildren(node, this.legend);
    for (const [name, value] of Object.entries({
      tabindex: 0, role: "application", "aria-roledescription": kind, "aria-describedby": "readout", "aria-label": `${label}: ${keys}`,
    })) node.setAttribute(name, value);
    node.addEventListener("pointermove", (event) => this.hover(event));
    node.addEventListener("pointerleave", () => this.leave());
    node.addEventListener("click", (event) => this.click(event));
    node.addEventListener("keydown", (event) => this.key(event));
  }

  leave() { tip.hide(); }
}
