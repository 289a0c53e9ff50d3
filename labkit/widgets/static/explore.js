// The view of `explore`: native controls, one picture per state. Pictures known to the page are shown at once, others asked from the kernel.

class ExploreView {
  constructor(el, store) {
    this.store = store;
    this.at = [...store.start];
    this.picture = h("img", { class: "labkit-picture", style: `width:min(100%, ${store.width}px)` });
    this.words = h("p", { class: "labkit-words", "aria-live": "polite" });
    const rows = store.controls.map((control, c) => this.control(control, c));
    const head = store.title ? [h("div", { class: "labkit-head" }, h("span", { class: "labkit-title" }, store.title))] : [];
    this.root = h("div", { class: "labkit-explore", role: "group", "aria-label": store.title || "Interactive view", "data-lm-suppress-shortcuts": "true" },
      ...head, h("div", { class: "labkit-controls" }, ...rows), this.picture, this.words);
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(this.root);
    store.views.add(new WeakRef(this));
    this.show();
  }

  control({ name, labels, slides }, c) {
    const input = slides
      ? h("input", { type: "range", min: "0", max: String(labels.length - 1), step: "1", value: String(this.at[c]) })
      : h("select", {}, ...labels.map((label, i) => h("option", i === this.at[c] ? { value: i, selected: "" } : { value: i }, label)));
    const shown = h("output", {}, slides ? labels[this.at[c]] : "");
    const tell = () => {
      if (!slides) return;
      shown.textContent = labels[this.at[c]];
      input.setAttribute("aria-valuetext", `${name} ${labels[this.at[c]]}`);
    };
    tell();
    input.addEventListener("input", () => {
      this.at[c] = Number(input.value);
      tell();
      this.show();
    });
    return h("label", {}, h("span", {}, name), input, shown);
  }

  show() {
    const state = this.at.join(","), url = this.store.urls.get(state);
    this.root.dataset.state = state;
    this.root.dataset.waiting = !url;
    if (!url) return this.store.ask(state);
    this.picture.src = url;
    this.picture.alt = this.words.textContent = this.store.words.get(state);
  }
}

function initialize({ model }) {
  const url = (bytes) => URL.createObjectURL(new Blob([bytes], { type: "image/png" }));
  const store = {
    title: model.get("title"), controls: model.get("controls"), start: model.get("start"), width: model.get("width"), views: new Set(),
    urls: new Map(Object.entries(model.get("pictures")).map(([state, bytes]) => [state, url(bytes)])),
    words: new Map(Object.entries(model.get("words"))),
    ask: (state) => model.send({ want: state }),
  };
  model.on("msg:custom", (message, buffers) => {
    store.urls.set(message.at, url(buffers[0]));
    store.words.set(message.at, message.words);
    for (const ref of store.views) {
      const view = ref.deref();
      if (!view) store.views.delete(ref);
      else if (view.at.join(",") === message.at) view.show();
    }
  });
  page.remember(model.get("key"), (host) => {
    new ExploreView(host, store);
    return store.words.get(store.start.join(","));
  });
}

export default { initialize, render() {} };
