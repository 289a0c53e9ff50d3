// The live view of ranks: one line of live memory per rank, legend with numbers, words. It draws what the kernel sends.

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]]; // ranks whose colours repeat are told apart by these

class RanksView {
  constructor(el, source) {
    this.title = h("span", { class: "labkit-title" }, source.info.title);
    this.state = h("span", { class: "labkit-state" });
    this.plotBox = h("div", { class: "labkit-plot", role: "img" });
    this.legend = h("div", { class: "labkit-legend" });
    this.words = h("p", { class: "labkit-words" });
    this.root = h("div", { class: "labkit-memory labkit-ranks", role: "group", "aria-label": source.info.title },
      h("div", { class: "labkit-head" }, this.title, this.state), this.plotBox, this.legend, this.words);
    el.append(this.root);
    this.source = source;
    this.uplot = this.makePlot(source.info.ranks);
    new ResizeObserver(() => {
      const width = this.plotBox.clientWidth;
      if (width > 50 && width !== this.uplot.width) this.uplot.setSize({ width, height: 240 });
    }).observe(this.plotBox);
    page.themed(this);
    this.show(source);
  }

  makePlot(ranks) {
    const theme = (name, otherwise) => () => getComputedStyle(this.plotBox).getPropertyValue(name).trim() || otherwise;
    const ink = theme("--jp-ui-font-color1", "#333"), grid = { stroke: theme("--jp-border-color2", "#ddd"), width: 1 };
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = ranks.map((rank, i) => ({
      label: rank.name, stroke: rank.colour, width: 1.75, dash: DASHES[Math.floor(i / 6) % DASHES.length], paths: stepped, points: { show: false },
    }));
    return new uPlot({
      width: Math.max(this.plotBox.clientWidth, 200), height: 240, padding: [10, 14, 0, 0], legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false }, y: { range: () => [0, Math.max(1, ...this.source.info.ranks.map((rank) => rank.peak)) * 1.1] } },
      series: [{}, ...series],
      axes: [
        { stroke: ink, grid: { show: false }, space: 70, values: (u, splits) => timeLabels(splits) },
        { stroke: ink, grid, size: 66, space: 34, incrs: byteIncrements(), values: (u, splits) => splits.map((b) => (b === 0 ? "0" : humanBytes(b).replace(".0 ", " "))) },
      ],
    }, this.columns(), this.plotBox);
  }

  columns() {
    const { rows, info } = this.source, n = Math.floor(rows.length / (info.ranks.length + 1));
    return Array.from({ length: info.ranks.length + 1 }, (_, i) => rows.subarray(i * n, (i + 1) * n));
  }

  show(source) {
    this.source = source;
    const { info } = source;
    this.uplot.setData(this.columns());
    this.root.dataset.running = info.running;
    this.state.textContent = `${info.state} · ${info.ranks.length} ranks · highest peak ${humanBytes(Math.max(0, ...info.ranks.map((rank) => rank.peak)))}`;
    this.legend.replaceChildren(...info.ranks.map((rank) => h("span", { class: "labkit-key" },
      h("i", { style: `background:${rank.colour}` }), rank.name, h("b", {}, humanBytes(rank.bytes)), rank.phase)));
    this.words.textContent = info.words;
    this.plotBox.setAttribute("aria-label", `Live memory of every rank. ${info.words}`);
  }

  repaint() {
    this.uplot.redraw(false, true);
  }
}

function sourceOf(model) {
  const rows = model.get("rows"), bytes = new Uint8Array(rows.byteLength);
  bytes.set(new Uint8Array(rows.buffer, rows.byteOffset, rows.byteLength));
  return { info: model.get("info"), rows: new Float64Array(bytes.buffer) };
}

function initialize({ model }) {
  const keep = () => {
    const { leaves } = model.get("info");
    if (leaves) page.remember(model.get("key"), leaves);
  };
  model.on("change:info", keep);
  keep();
}

function render({ model, el }) {
  const view = new RanksView(el, sourceOf(model));
  model.on("change:info", () => view.show(sourceOf(model)));
}

export default { initialize, render };
