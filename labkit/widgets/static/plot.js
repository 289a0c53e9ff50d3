// The stacked plot: uPlot with the course's axes, phases, limits and peak. It draws `source` and computes nothing but pixels.
//
// source = { info, rows }; rows = Float64Array of (seconds, operator index, bytes per category...) in info.categories' order, bottom first.

const STRIP = 17; // pixels of the phase strip between plot and time labels

function colour(element, name, otherwise) {
  return getComputedStyle(element).getPropertyValue(name).trim() || otherwise;
}

function columnsOf({ info, rows }) {
  const width = 2 + info.categories.length;
  const n = Math.floor(rows.length / width);
  const held = n && info.seconds > rows[(n - 1) * width] ? 1 : 0; // the last value holds until now
  const data = [new Float64Array(n + held), ...info.categories.map(() => new Float64Array(n + held))];
  for (let i = 0; i < n + held; i++) {
    const at = Math.min(i, n - 1) * width;
    data[0][i] = i < n ? rows[at] : info.seconds;
    let sum = 0;
    // Highest sum first: each lower area is painted over the one above it, so opaque fills make the stack.
    for (let c = 0; c < info.categories.length; c++) data[info.categories.length - c][i] = sum += rows[at + 2 + c];
  }
  data.push(data[1]); // the total once more: its line lies over all fills
  return data;
}

function topOf(info) {
  const highest = Math.max(info.peak.bytes, ...info.card_samples.map((sample) => sample[2]), 1);
  const near = info.limits.map((limit) => limit.bytes).filter((bytes) => bytes <= 4 * highest);
  return Math.max(highest, ...near) * 1.16;
}

function byteIncrements() {
  const steps = [];
  for (let unit = 1; unit < 2 ** 50; unit *= 1024) for (const step of [1, 2, 5, 10, 20, 50, 100, 200, 500]) steps.push(step * unit);
  return steps;
}

// One unit for the whole axis: 0, 200 ms, 400 ms or 0, 0.5 s, 1 s.
function timeLabels(splits) {
  const [name, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find((unit) => splits.at(-1) >= unit[1]) ?? ["s", 1];
  return splits.map((seconds) => (seconds === 0 ? "0" : `${Number((seconds / size).toPrecision(6))} ${name}`));
}

class Plot {
  constructor(host, source, onCursor) {
    this.host = host;
    this.source = source;
    const info = source.info;
    const ink = () => colour(host, "--jp-ui-font-color1", "#333");
    const ground = () => colour(host, "--jp-layout-color0", "#fff");
    const grid = { stroke: () => colour(host, "--jp-border-color2", "#ddd"), width: 1 };
    const font = `11px ${colour(host, "--jp-ui-font-family", "system-ui, sans-serif")}`;
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = [...info.categories].reverse().map((name) => ({
      label: name, fill: info.colours[name], stroke: ground, width: 0.75, paths: stepped, points: { show: false },
    }));
    series.push({ label: "total", stroke: ink, width: 1.25, paths: stepped, points: { show: false } });
    this.uplot = new uPlot({
      width: Math.max(host.clientWidth, 200), height: this.height(), pxAlign: 0,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: () => [0, Math.max(this.source.info.seconds, 1e-4)] }, y: { range: () => [0, topOf(this.source.info)] } },
      series: [{}, ...series],
      axes: [
        { stroke: ink, font, grid: { show: false }, ticks: { show: false }, gap: STRIP + 5, size: STRIP + 22, space: 70,
          values: (u, splits) => timeLabels(splits) },
        { stroke: ink, font, grid, ticks: { show: false }, gap: 6, size: 66, incrs: byteIncrements(), space: 34,
          values: (u, splits) => splits.map((b) => (b === 0 ? "0" : humanBytes(b).replace(".0 ", " "))) },
      ],
      hooks: { drawAxes: [(u) => this.drawPhases(u)], draw: [(u) => this.drawMarks(u)], setCursor: [(u) => onCursor(this.holding(u))] },
    }, columnsOf(source), host);
    new ResizeObserver(() => this.resize()).observe(host);
  }

  height() {
    return Math.round(Math.min(320, Math.max(220, this.host.clientWidth * 0.36)));
  }

  resize() {
    const width = this.host.clientWidth;
    if (width > 50 && width !== this.uplot.width) this.uplot.setSize({ width, height: this.height() });
  }

  // Memory holds its value until the next change, so the cursor reads the last change at or before it, not the nearest one.
  holding(u) {
    const { idx, left } = u.cursor;
    if (idx == null) return null;
    if (this.wanted != null) return this.wanted;
    return idx > 0 && u.data[0][idx] > u.posToVal(left, "x") ? idx - 1 : idx;
  }

  show(source) {
    this.source = source;
    this.uplot.setData(columnsOf(source));
  }

  repaint() {
    this.uplot.redraw(false, true);
  }

  moveTo(index) {
    this.wanted = index; // many changes may lie under one pixel: the keyboard reaches each of them
    this.uplot.setCursor({ left: this.uplot.valToPos(this.uplot.data[0][index], "x"), top: this.uplot.over.clientHeight / 2 });
    this.wanted = null;
  }

  drawPhases(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio, { info } = this.source;
    const order = [...new Set(info.phases.map((phase) => phase[0]))];
    ctx.save();
    ctx.font = `${11 * ratio}px ${colour(this.host, "--jp-ui-font-family", "system-ui, sans-serif")}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (const [name, start, stop] of info.phases) {
      const a = Math.max(u.valToPos(start, "x", true), left), b = Math.min(u.valToPos(stop ?? info.seconds, "x", true), left + width);
      const tint = info.phase_colours[order.indexOf(name) % info.phase_colours.length];
      ctx.fillStyle = tint;
      ctx.globalAlpha = 0.08;
      ctx.fillRect(a, top, b - a, height);
      ctx.globalAlpha = 1;
      ctx.fillRect(a, top + height + 2 * ratio, Math.max(b - a - 1, 1), STRIP * ratio);
      if (ctx.measureText(name).width + 8 * ratio > b - a) continue;
      ctx.fillStyle = "#fff";
      ctx.fillText(name, (a + b) / 2, top + height + (2 + STRIP / 2 + 0.5) * ratio);
    }
    ctx.restore();
  }

  drawMarks(u) {
    const { ctx } = u, { left, width } = u.bbox, ratio = devicePixelRatio, { info } = this.source;
    const family = colour(this.host, "--jp-ui-font-family", "system-ui, sans-serif");
    ctx.save();
    const label = (text, x, y, align, ink, weight) => {
      ctx.font = `${weight} ${12 * ratio}px ${family}`;
      const w = ctx.measureText(text).width + 10 * ratio, tall = 18 * ratio;
      const x0 = Math.min(Math.max(align === "right" ? x - w : x, left), left + width - w);
      ctx.fillStyle = colour(this.host, "--jp-layout-color0", "#fff");
      ctx.globalAlpha = 0.85;
      ctx.beginPath();
      ctx.roundRect(x0, y - tall / 2, w, tall, 4 * ratio);
      ctx.fill();
      ctx.globalAlpha = 1;
      ctx.fillStyle = ink;
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      ctx.fillText(text, x0 + 5 * ratio, y + ratio);
    };
    const ink = colour(this.host, "--jp-ui-font-color0", "#111");
    const peakX = u.valToPos(info.peak.seconds, "x", true);
    // What the card's allocator counts, beside what the recorder counts: two lines over the stack.
    for (const [name, column, dash] of [["allocated", 1, []], ["reserved", 2, [2, 3]]]) {
      if (!info.card_samples.length) break;
      ctx.strokeStyle = ink;
      ctx.lineWidth = 1.25 * ratio;
      ctx.setLineDash(dash.map((length) => length * ratio));
      ctx.beginPath();
      for (const sample of info.card_samples) ctx.lineTo(u.valToPos(sample[0], "x", true), u.valToPos(sample[column], "y", true));
      ctx.stroke();
      const last = info.card_samples.at(-1)[column];
      label(`card: ${humanBytes(last)} ${name}`, left + width, u.valToPos(last, "y", true) - 10 * ratio, "right", ink, "normal");
    }
    for (const limit of info.limits) {
      if (limit.bytes > topOf(info)) continue;
      const y = u.valToPos(limit.bytes, "y", true), red = colour(this.host, "--jp-error-color1", "#b00020");
      ctx.strokeStyle = red;
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([7 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + width, y);
      ctx.stroke();
      const side = peakX > left + width * 0.6 ? "left" : "right"; // where the peak's label is not
      label(`${limit.name} ${humanBytes(limit.bytes)}`, side === "left" ? left : left + width, y - 11 * ratio, side, red, "normal");
    }
    if (info.peak.bytes > 0) {
      const x = peakX, y = u.valToPos(info.peak.bytes, "y", true);
      ctx.setLineDash([]);
      ctx.fillStyle = ink;
      ctx.beginPath();
      ctx.moveTo(x, y - 1 * ratio);
      ctx.lineTo(x - 5 * ratio, y - 9 * ratio);
      ctx.lineTo(x + 5 * ratio, y - 9 * ratio);
      ctx.fill();
      const rightHalf = x > left + width * 0.7;
      label(`peak ${humanBytes(info.peak.bytes)}${info.peak.phase ? ` · ${info.peak.phase}` : ""}`, x + (rightHalf ? -9 : 9) * ratio, y - 8 * ratio, rightHalf ? "right" : "left", ink, "bold");
    }
    ctx.restore();
  }
}
