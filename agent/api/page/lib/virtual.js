// A list of which only the visible part is in the document: items of one height, in one column or several, kept by key.

const OVER = 4; // lines above and below what is seen
const PRINTED_MAX = 3000;

export class Virtual {
  // make(key) -> an element; fill(element, key): what it shows now.
  constructor({ scroller, height, make, fill, columns = () => 1 }) {
    Object.assign(this, { scroller, height, make, fill, columns });
    this.el = document.createElement("div");
    this.el.className = "virtual";
    this.keys = [];
    this.places = new Map();
    this.shown = new Map(); // key -> element
    this.all = false;
    this.waiting = false;
    this.soon = () => {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        this.draw();
      });
    };
    this.printed = (all) => {
      this.all = all;
      this.draw();
    };
    this.before = () => this.printed(true);
    this.after = () => this.printed(false);
    scroller.addEventListener("scroll", this.soon, { passive: true });
    addEventListener("beforeprint", this.before);
    addEventListener("afterprint", this.after);
    this.sizes = new ResizeObserver(this.soon);
    this.sizes.observe(scroller);
  }

  close() {
    clearTimeout(this.ordering);
    this.scroller.removeEventListener("scroll", this.soon);
    removeEventListener("beforeprint", this.before);
    removeEventListener("afterprint", this.after);
    this.sizes.disconnect();
  }

  set(keys) {
    this.keys = keys;
    this.places = new Map(keys.map((key, at) => [key, at]));
    this.draw(true);
  }

  // Show these keys' rows anew where they are in the document; undefined: all that are.
  refresh(keys) {
    for (const [key, element] of this.shown) if (!keys || keys.has(key)) this.fill(element, key);
  }

  // The part of the list that is in the window, as [first, last) of the keys.
  range(wide) {
    if (this.all) return [0, Math.min(this.keys.length, PRINTED_MAX)];
    const top = this.scroller.getBoundingClientRect().top - this.el.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / this.height) - OVER) * wide;
    const lines = Math.ceil(this.scroller.clientHeight / this.height) + 2 * OVER;
    return [Math.min(first, this.keys.length), Math.min(this.keys.length, first + lines * wide)];
  }

  draw(anew = false) {
    const wide = this.columns(this.el.clientWidth || this.scroller.clientWidth);
    const tall = `${Math.ceil(this.keys.length / wide) * this.height}px`;
    if (this.el.style.height !== tall) this.el.style.height = tall;
    const [first, last] = this.range(wide);
    if (!anew && this.drawn?.join() === [first, last, wide].join()) return;
    const moved = anew || this.drawn?.[2] !== wide;
    this.drawn = [first, last, wide];
    const wanted = new Set(this.keys.slice(first, last));
    const spare = [];
    for (const [key, element] of this.shown) {
      if (wanted.has(key)) continue;
      this.shown.delete(key);
      spare.push(element);
    }
    for (let at = first; at < last; at++) {
      const key = this.keys[at];
      let element = this.shown.get(key);
      if (element && !moved) continue;
      if (!element) {
        element = spare.pop() ?? this.make();
        this.shown.set(key, element);
        this.fill(element, key);
        if (!element.isConnected) this.el.append(element);
      } else this.fill(element, key);
      this.put(element, at, wide);
    }
    for (const element of spare) element.remove();
    clearTimeout(this.ordering);
    this.ordering = setTimeout(() => this.order(), 250);
  }

  put(element, at, wide) {
    const x = wide > 1 ? `${100 * (at % wide)}%` : 0;
    element.style.transform = `translate(${x}, ${Math.floor(at / wide) * this.height}px)`;
    const width = wide > 1 ? `${100 / wide}%` : "";
    if (element.style.width !== width) element.style.width = width;
  }

  // Elements are used again wherever they stand; once scrolling rests they stand in the order in which they are read.
  order() {
    if (this.el.contains(document.activeElement)) return;
    const [first, last] = this.drawn;
    this.keys.slice(first, last).forEach((key, at) => {
      const element = this.shown.get(key),
        there = this.el.children[at];
      if (element && element !== there) this.el.insertBefore(element, there ?? null);
    });
  }

  // Scroll so that this item is seen. `under`: pixels at the top that something else covers.
  reveal(key, under = 0) {
    const at = this.places.get(key);
    if (at === undefined) return;
    const wide = this.columns(this.el.clientWidth);
    const top =
      this.el.getBoundingClientRect().top -
      this.scroller.getBoundingClientRect().top +
      Math.floor(at / wide) * this.height;
    if (top < under) this.scroller.scrollTop += top - under;
    else if (top + this.height > this.scroller.clientHeight)
      this.scroller.scrollTop += top + this.height - this.scroller.clientHeight;
    this.draw();
  }
}
