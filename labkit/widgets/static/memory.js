// The live memory view: plot, legend, readout, keyboard, words. One instance per place where it is shown.

const ANNOUNCE_MS = 8000; // a screen reader hears news at most this often

class MemoryView {
  constructor(el, source) {
    this.paused = false;
    this.source = this.shown = source;
    this.index = null;
    this.announced = 0;
    const { info } = source;
    this.title = h("span", { class: "labkit-title" }, info.title);
    this.state = h("span", { class: "labkit-state" });
    this.pause = h("button", { type: "button", class: "labkit-button", title: "Freeze the picture; the cell runs on (space)" }, "Pause");
    this.plotBox = h("div", { class: "labkit-plot", role: "img" });
    this.slider = h("div", { class: "labkit-slider", role: "slider", tabindex: "0", "aria-label": "Time cursor", "aria-valuemin": "0" });
    this.tip = h("div", { class: "labkit-tip", "aria-hidden": "true" });
    this.legend = h("div", { class: "labkit-legend" });
    this.words = h("p", { class: "labkit-words" });
    this.table = h("div");
    this.spoken = h("div", { class: "labkit-spoken", "aria-live": "polite" });
    this.root = h("div", { class: "labkit-memory", role: "group", "aria-label": info.title, "data-lm-suppress-shortcuts": "true" },
      h("div", { class: "labkit-head" }, this.title, this.state, this.pause),
      h("div", { class: "labkit-stage" }, this.plotBox, this.slider, this.tip), this.legend, this.words,
      h("details", { class: "labkit-details" }, h("summary", {}, "Numbers as a table"), this.table), this.spoken);
    el.append(this.root);
    this.plot = new Plot(this.plotBox, source, (index) => this.read(index));
    this.pause.addEventListener("click", () => this.toggle());
    this.plotBox.addEventListener("mousedown", () => this.slider.focus({ preventScroll: true }));
    this.root.addEventListener("keydown", (event) => this.key(event));
    page.themed(this);
    this.tell();
  }

  show(source) {
    this.source = source;
    if (!source.info.running) this.paused = false;
    if (!this.paused) {
      this.shown = source;
      this.plot.show(source);
    }
    this.tell();
  }

  repaint() {
    this.plot.repaint();
  }

  toggle() {
    if (!this.source.info.running) return;
    this.paused = !this.paused;
    this.show(this.source);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " " && event.target === this.slider) this.toggle();
    else if (event.target === this.slider && ["ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End", "Escape"].includes(event.key)) this.step(event.key);
    else return event.stopPropagation();
    event.preventDefault();
    event.stopPropagation();
  }

  step(key) {
    const last = this.plot.uplot.data[0].length - 1;
    if (key === "Escape" || last < 0) {
      this.plot.uplot.setCursor({ left: -10, top: -10 });
      return;
    }
    const from = this.index ?? last, jump = Math.max(1, Math.round(last / 20));
    const moves = { ArrowLeft: from - 1, ArrowRight: from + 1, PageDown: from - jump, PageUp: from + jump, Home: 0, End: last };
    this.plot.moveTo(Math.min(Math.max(moves[key], 0), last));
  }

  // Everything known about the row at `index`: exact bytes, phase, and the operator whose storage made the change.
  at(index) {
    const { info, rows } = this.shown, width = 2 + info.categories.length, n = Math.floor(rows.length / width);
    const row = rows.subarray(Math.min(index, n - 1) * width, Math.min(index, n - 1) * width + width);
    const seconds = this.plot.uplot.data[0][index];
    const parts = info.categories.map((name, c) => [name, row[2 + c]]);
    const phase = info.phases.filter(([, start, stop]) => start <= seconds && seconds <= (stop ?? Infinity)).at(-1);
    return { seconds, parts, total: parts.reduce((sum, part) => sum + part[1], 0), phase: phase && phase[0], operator: this.shown.operators[row[1]] };
  }

  read(index) {
    this.index = index;
    this.tip.style.display = index == null ? "none" : "block";
    if (index == null || !this.shown.rows.length) return this.tell();
    const now = this.at(index), { info } = this.shown;
    const place = this.plot.uplot.valToPos(now.seconds, "x") + this.plot.uplot.over.offsetLeft;
    this.tip.replaceChildren(
      h("div", { class: "labkit-tip-head" }, h("b", {}, humanBytes(now.total)), ` ${now.total.toLocaleString("en")} B`),
      h("div", {}, `${humanSeconds(now.seconds)}${now.phase ? ` · ${now.phase}` : ""}`),
      ...now.parts.filter((part) => part[1]).reverse().map(([name, bytes]) => h("div", { class: "labkit-tip-row" },
        h("i", { style: `background:${info.colours[name]}` }), name, h("span", {}, `${bytes.toLocaleString("en")} B`))),
      h("div", { class: "labkit-tip-foot" }, now.operator ? `allocated by ${now.operator}` : "a storage was freed"));
    const half = place > this.plotBox.clientWidth / 2;
    this.tip.style.left = half ? "" : `${place + 12}px`;
    this.tip.style.right = half ? `${this.plotBox.clientWidth - place + 12}px` : "";
    this.tell();
  }

  // Legend, header, words and table from the numbers shown.
  tell() {
    const { info } = this.source, shown = this.shown.info, last = this.plot.uplot.data[0].length - 1;
    const at = last >= 0 && this.shown.rows.length ? this.at(this.index ?? last) : { parts: shown.categories.map((name) => [name, 0]), total: 0, seconds: 0 };
    this.root.dataset.running = info.running;
    this.pause.hidden = !info.running;
    this.pause.textContent = this.paused ? "Resume" : "Pause";
    this.pause.setAttribute("aria-pressed", this.paused);
    const behind = this.paused ? `paused, ${humanSeconds(info.seconds - shown.seconds)} behind` : info.state;
    this.state.textContent = `${behind} · ${humanBytes(at.total)} ${this.index == null ? (info.running ? "now" : "at the end") : "at the cursor"} · peak ${humanBytes(shown.peak.bytes)}`;
    const names = [...new Set(shown.phases.map((phase) => phase[0]))];
    this.legend.replaceChildren(
      ...at.parts.map(([name, bytes], c) => h("span", { class: "labkit-key", "data-empty": !bytes && !shown.peak.parts[c] },
        h("i", { style: `background:${shown.colours[name]}` }), name, h("b", {}, humanBytes(bytes)))),
      ...names.slice(0, shown.phase_colours.length).map((name, i) => h("span", { class: "labkit-key labkit-phase" },
        h("i", { style: `background:${shown.phase_colours[i]}` }), name)));
    this.words.textContent = info.words;
    this.plotBox.setAttribute("aria-label", `Chart of live memory. ${info.words}`);
    this.slider.setAttribute("aria-valuemax", shown.seconds.toFixed(6));
    this.slider.setAttribute("aria-valuenow", at.seconds.toFixed(6));
    this.slider.setAttribute("aria-valuetext", `${humanSeconds(at.seconds)}${at.phase ? `, ${at.phase}` : ""}: ${humanBytes(at.total)} in all; `
      + at.parts.filter((part) => part[1]).map(([name, bytes]) => `${name} ${humanBytes(bytes)}`).join(", ")
      + (at.operator ? `; allocated by ${at.operator}` : ""));
    this.fillTable(shown, at);
    if (!info.running || Date.now() - this.announced > ANNOUNCE_MS) {
      this.announced = Date.now();
      if (this.spoken.textContent !== info.words) this.spoken.textContent = info.words;
    }
  }

  fillTable(info, at) {
    const cell = (tag, text) => h(tag, tag === "th" ? { scope: "row" } : {}, text);
    const line = (tag, name, ...values) => h("tr", {}, cell("th", name), ...values.map((value) => cell(tag, value)));
    const bytes = (count) => `${Math.round(count).toLocaleString("en")} B`;
    const where = this.index == null ? (info.running ? "now" : "at the end") : "at the cursor";
    this.table.replaceChildren(
      h("table", {}, h("thead", {}, line("th", "category", where, "at the peak")),
        h("tbody", {}, ...at.parts.map(([name, count], c) => line("td", name, bytes(count), bytes(info.peak.parts[c]))),
          line("td", "total", bytes(at.total), bytes(info.peak.bytes)))),
      ...(info.by_phase.length ? [h("table", {}, h("thead", {}, line("th", "phase", "highest live memory", "seconds")),
        h("tbody", {}, ...info.by_phase.map(([name, peak, seconds]) => line("td", name, bytes(peak), seconds.toFixed(3)))))] : []));
  }
}

function sourceOf(model) {
  const base = model.get("base"), tail = model.get("tail");
  const bytes = new Uint8Array(base.byteLength + tail.byteLength);
  bytes.set(new Uint8Array(base.buffer, base.byteOffset, base.byteLength));
  bytes.set(new Uint8Array(tail.buffer, tail.byteOffset, tail.byteLength), base.byteLength);
  return { info: model.get("info"), operators: model.get("operators"), rows: new Float64Array(bytes.buffer) };
}

// `info` changes in every message and is set together with `base` and `tail`, so it alone says that there is something new.
function initialize({ model }) {
  const keep = () => {
    const source = sourceOf(model);
    if (!source.info.running) page.remember(model.get("key"), (host) => {
      new MemoryView(host, source);
      return source.info.words;
    });
  };
  model.on("change:info", keep);
  keep();
}

function render({ model, el }) {
  const view = new MemoryView(el, sourceOf(model));
  model.on("change:info", () => view.show(sourceOf(model)));
}

export default { initialize, render };
