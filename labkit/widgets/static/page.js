// What all labkit views of one browser page share: one store of finished views, one watcher.
//
// A saved notebook must hold a plain PNG, and an open session must stay explorable. Both: when a cell is done the kernel replaces the live view by
// a PNG that carries the view's key in a text chunk. This page still knows what it drew under that key, and puts the view in the
// picture's place wherever the picture turns up. A page that never saw the view (a reopened notebook, GitHub, nbconvert) shows the picture.

const PNG = "data:image/png;base64,";
const KEPT = 64; // finished views remembered per page

function keyOf(img) {
  if (!img.src.startsWith(PNG)) return null;
  // The chunk follows the 33 bytes of signature and header: base64 character 44. Length 4, "tEXt" 4, "labkit\0" 7, then the key.
  const head = img.src.slice(PNG.length + 44, PNG.length + 44 + 64);
  try {
    const found = /^[^]{4}tEXtlabkit\0([0-9a-f]{32})/.exec(atob(head));
    return found && found[1];
  } catch {
    return null;
  }
}

function makePage() {
  const makers = new Map(); // key -> (host element) => words that describe the view; or only words
  const themed = new Set(); // WeakRefs of views to repaint when the theme changes

  function upgrade(img) {
    const make = img.dataset.labkit ? null : makers.get(keyOf(img));
    if (!make) return;
    if (typeof make === "string") { // nothing to explore: the picture stays, and says in words what it shows
      img.alt = make;
      return;
    }
    const host = document.createElement("div");
    host.className = "labkit-host";
    img.dataset.labkit = "replaced";
    img.style.display = "none";
    img.after(host);
    img.alt = make(host) || "";
  }

  function scan(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    if (node.tagName === "IMG") upgrade(node);
    else for (const img of node.getElementsByTagName("img")) upgrade(img);
  }

  new MutationObserver((records) => {
    if (makers.size) for (const record of records) record.addedNodes.forEach(scan);
  }).observe(document.body, { childList: true, subtree: true });

  new MutationObserver(() => {
    for (const ref of themed) {
      const view = ref.deref();
      if (view) view.repaint();
      else themed.delete(ref);
    }
  }).observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });

  return {
    remember(key, make) {
      makers.delete(key);
      makers.set(key, make);
      if (makers.size > KEPT) makers.delete(makers.keys().next().value);
      scan(document.body);
    },
    themed: (view) => themed.add(new WeakRef(view)),
  };
}

const page = (globalThis[Symbol.for("labkit.page.1")] ??= makePage());

// A small element maker: h("button", {class: "x"}, child, "text")
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function humanBytes(count) {
  const [name, size] = byteUnit(Math.abs(count));
  const digits = size === 1 ? 0 : Math.abs(count) < 1000 * size ? 1 : 0;
  return `${(count / size).toFixed(digits)} ${name}`;
}

function byteUnit(largest) {
  for (const unit of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (largest >= unit[1]) return unit;
  return ["B", 1];
}

function humanSeconds(seconds) {
  if (seconds >= 1 || seconds === 0) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
}
