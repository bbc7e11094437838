// What is wrong with each run: in words, and as bars on a time line.

const by = (id) => document.getElementById(id);
const MOST = 12; // lines per run; the others are folded
const sentence = (text) => text ? text[0].toUpperCase() + text.slice(1) : "";
const several = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

function element(tag, kind, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

function button(kind, act, ...children) {
  const made = element("button", kind, ...children);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

const lastStep = (run) => run.steps[run.steps.length - 1];

// Model, policy, monitor, dates, and the size of the recording.
function aboutOf(run) {
  const counts = new Set(run.layers.map(({ heads }) => heads.length));
  const size = counts.size === 1 ? `${several(run.layers.length, "layer")} × ${several([...counts][0], "head")}`
    : `${several(run.layers.length, "layer")}, ${several(run.columns.length, "head")}`;
  const recorded = `${several(run.reported, "report")} from step ${run.steps[0]} to ${lastStep(run)}`;
  const unreadable = run.unreadable ? [several(run.unreadable, "unreadable line")] : [];
  return [...run.about, size, recorded, ...unreadable].join(" · ");
}

function summaryOf(run) {
  const open = run.events.filter(({ end }) => end === null).length, all = run.events.length;
  if (!all) return `Nothing is wrong: no problem was found in ${several(run.reported, "report")}`;
  if (!open) return `${several(all, "problem")} in the past, none at the last report`;
  const past = all - open ? `, ${all - open} in the past` : "";
  return `${several(open, "problem")} at the last report, step ${lastStep(run)}${past}`;
}

function lineOf(run, event) {
  const { title, severity, message, advice, end } = event;
  const line = element("li", `${severity}${end === null ? "" : " over"}`);
  line.append(element("span", "badge", end === null ? severity : "over"), " ");
  line.append(button("link", () => goTo(run, event), sentence(title)), `: ${message}. `);
  line.append(element("span", "quiet", end === null ? `Ongoing at step ${lastStep(run)}.` : `Over at step ${end}.`));
  if (advice) line.append(element("div", "advice", element("b", "", "What to try: "), advice));
  return line;
}

function verdictOf(run, index) {
  const box = element("div", "verdict"), worst = run.events.find(({ end }) => end === null);
  const tone = worst ? worst.severity : "fine";
  const heading = element("h2", tone, element("span", "sign", { critical: "■", warning: "▲", fine: "✓" }[tone] || "▲"), summaryOf(run));
  if (runs.length > 1) {
    box.append(element("h3", "", swatch(index), run.label), element("p", "hint", aboutOf(run)));
  }
  box.append(heading);
  const lines = run.events.map((event) => lineOf(run, event));
  if (lines.length) box.append(element("ul", "", ...lines.slice(0, MOST)));
  if (lines.length > MOST) {
    const others = element("details", "", element("summary", "", `${lines.length - MOST} more`), element("ul", "", ...lines.slice(MOST)));
    box.append(others);
  }
  return box;
}

// The colour of a run in the charts of a comparison.
const colourOf = (index) => variable(`--run${index % 6}`);
function swatch(index) {
  const made = element("i", "swatch");
  made.style.background = `var(--run${index % 6})`;
  return made;
}

// First and last step of all runs.
const EXTENT = [Math.min(...runs.map(({ steps }) => steps[0])), Math.max(...runs.map(lastStep))];
const across = (step) => 100 * (EXTENT[1] > EXTENT[0] ? (step - EXTENT[0]) / (EXTENT[1] - EXTENT[0]) : 0);

function track(...bars) {
  return element("div", "track", ...bars);
}

// One row per cause, a bar from begin to end of each event.
function timeline() {
  const rows = [];
  runs.forEach((run, index) => {
    for (const cause of new Set(run.events.map((event) => event.cause))) {
      const own = run.events.filter((event) => event.cause === cause);
      const bars = own.map((event) => {
        const { severity, start, end, message } = event, stop = end === null ? lastStep(run) : end;
        const bar = button(`bar ${severity}${end === null ? " open" : ""}`, () => goTo(run, event));
        bar.style.left = `min(${across(start).toFixed(2)}%, 100% - 8px)`;
        bar.style.width = `${Math.max(0, across(stop) - across(start)).toFixed(2)}%`;
        bar.title = `${sentence(message)}; ${end === null ? "ongoing" : `over at step ${end}`}`;
        bar.setAttribute("aria-label", bar.title);
        return bar;
      });
      const name = element("span", "name", ...(runs.length > 1 ? [swatch(index)] : []), own[0].title);
      rows.push(element("div", "row", name, track(...bars)));
    }
  });
  if (!rows.length) return [];
  const ticks = ticksOf({ low: EXTENT[0], high: EXTENT[1] + (EXTENT[1] === EXTENT[0]), log: false }, 5).filter((x) => x <= EXTENT[1]);
  const labels = ticks.map((step) => {
    const label = element("span", "", String(step));
    label.style.left = `${across(step).toFixed(2)}%`;
    return label;
  });
  const axis = element("div", "row axis", element("span", "name", "step"), element("div", "track", ...labels));
  const box = element("div", "timeline", ...rows, axis);
  box.id = "timeline";
  return [box];
}

function setUpVerdict() {
  by("run").textContent = runs.map(({ label }) => label).join(" and ");
  by("about").textContent = runs.length === 1 ? aboutOf(runs[0]) : `${runs.length} runs on the same axes`;
  by("verdict").append(...runs.map(verdictOf), ...timeline());
  by("terms").querySelector("dl").append(...page.terms.flatMap(([term, text]) => [element("dt", "", term), element("dd", "", text)]));
  const notes = runs.flatMap((run) => {
    const thinner = run.steps.length < run.reported ? [`To limit the size of the page, ${run.steps.length} of ${run.reported} reports are shown.`] : [];
    const rounded = run.exact ? [] : ["Values are rounded to about four digits; bands may be coarser."];
    return [run.path + ".", ...thinner, ...rounded];
  });
  by("footer").textContent = `${notes.join(" ")} attnscale ${page.version}. Entropy and logits are in nats, after temperature; N(t) uses raw scores.`;
}

// Selects the head that shows an event most clearly, at its first step.
function goTo(run, event) {
  const { layer, head } = run.columns[event.worst], quantity = page.quantities.find(({ name }) => name === event.quantity);
  const changes = { run: runs.indexOf(run), layer, head, step: indexNearest(run.steps, event.start) };
  if (quantity) Object.assign(changes, { quantity, statistic: quantity.shown });
  choose(changes);
  by("controls").scrollIntoView({ block: "start" });
}
