// Curves by uPlot (vendor/uPlot.js), which is loaded when the first one is drawn. Each has its numbers in words, too.
import { brief, h, s } from "./dom.js";

let loading = null;

function load() {
  loading ??= new Promise((done, failed) => {
    document.head.append(h("link", { rel: "stylesheet", href: "/vendor/uPlot.css" }));
    document.head.append(
      h("script", {
        src: "/vendor/uPlot.js",
        onload: () => done(globalThis.uPlot),
        onerror: () => failed(new Error("the curves' script did not come")),
      }),
    );
  });
  return loading;
}

// A colour of page.css as a canvas takes it: light-dark() and var() are resolved by an element that nobody sees.
const probe = h("span", { hidden: true });

function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const drawn = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((chart) => chart.redrawn()));

// One curve with a title: set([[x, y], ...]) with x ascending; y may be null where nothing is known.
export class Chart {
  constructor(title, { format = brief, x = "step", time = false, height = 180, least = null, most = null } = {}) {
    Object.assign(this, { title, format, x, time, height, least, most });
    this.words = h("figcaption", {}, h("strong", {}, title), h("span", { class: "said" }));
    this.box = h("div", { class: "curve", role: "img", "aria-label": title });
    this.el = h("figure", { class: "chart" }, this.words, this.box);
    this.data = [[], []];
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.box);
    drawn.add(this);
  }

  close() {
    this.sizes.disconnect();
    drawn.delete(this);
    this.plot?.destroy();
    this.plot = null;
    this.closed = true;
  }

  async set(points) {
    this.data = [points.map(([at]) => at), points.map(([, value]) => value)];
    const values = this.data[1].filter((value) => value != null);
    const said = values.length
      ? `${this.format(values.at(-1))} now; ${this.format(Math.min(...values))} to ${this.format(Math.max(...values))}` +
        (this.time ? "" : ` in steps ${points[0][0]} to ${points.at(-1)[0]}`)
      : "no value yet";
    this.words.lastChild.textContent = said;
    this.box.setAttribute("aria-label", `${this.title}: ${said}`);
    const Plot = await load();
    if (this.closed) return;
    if (this.plot) this.plot.setData(this.data);
    else this.draw(Plot);
  }

  draw(Plot) {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    const one = this.data[0].length < 2;
    this.plot = new Plot(
      {
        width: Math.max(120, this.box.clientWidth),
        height: this.height,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { x: { time: this.time }, y: { range: (_plot, low, high) => this.span(low, high) } },
        axes: [
          { ...axis, size: 26 },
          { ...axis, size: 56, values: (_plot, splits) => splits.map((value) => this.format(value)) },
        ],
        series: [
          {},
          { stroke: () => colour("--accent"), width: 1.75, fill: () => colour("--accent-wash"), points: { show: one } },
        ],
        hooks: { setCursor: [(plot) => this.point(plot)] },
      },
      this.data,
      this.box,
    );
  }

  span(low, high) {
    if (low == null) return [0, 1];
    const room = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    return [this.least ?? low - room, this.most ?? high + room];
  }

  point(plot) {
    const at = plot.cursor.idx;
    if (at == null || this.data[1][at] == null) return;
    const x = this.data[0][at];
    plot.root.title = `${this.time ? new Date(x * 1000).toLocaleTimeString() : `${this.x} ${x}`}: ${this.format(this.data[1][at])}`;
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  redrawn() {
    this.plot?.redraw(false, true);
  }
}

// A short line without axes, of values 0..1, for a row: its text stands beside it.
export function spark(values, width = 120, height = 22) {
  const step = width / Math.max(1, values.length - 1);
  const points = values.map(
    (value, at) => `${(at * step).toFixed(1)},${((1 - (value ?? 0)) * (height - 2) + 1).toFixed(1)}`,
  );
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    s("polyline", { points: points.join(" ") }),
  );
}
