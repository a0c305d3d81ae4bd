// Parts that several views have: headings, alarms, chips, bars, commands to copy, and the grid of rows.
import { h, say } from "./dom.js";
import { matcher, missing } from "./facts.js";
import { Virtual } from "./virtual.js";

let tones = {}; // state -> class, as the agent says (covey/core/tones.py)
export const setTones = (said) => (tones = said);
export const tone = (state) => (Object.hasOwn(tones, state) ? tones[state] : "quiet");

export function heading(title, ...more) {
  return h("div", { class: "heading" }, h("h1", { tabindex: "-1" }, title), ...more);
}

export const chip = (text) => h("span", { class: `chip ${tone(text)}` }, text);

export function sayChip(element, text) {
  say(element, text);
  const wanted = `chip ${tone(text)}`;
  if (element.className !== wanted) element.className = wanted;
}

export const alarm = (text, next = "") =>
  h("p", { class: "alarm", role: "alert" }, text, next && h("span", { class: "next" }, " Next: ", next));

export const quiet = (text) => h("p", { class: "empty" }, text);

// Who did not answer a list, above it.
export function gaps(element, unanswered) {
  const said = missing(unanswered);
  const shown = said.length > 3 ? [...said.slice(0, 3), `and ${said.length - 3} more`] : said;
  say(element, said.length ? `Incomplete: ${shown.join("; ")}.` : "");
  element.hidden = !said.length;
}

// A bar with a value of 0..1, or null where it is not known; its text stands beside it.
export function bar(share, kind = "") {
  return h("span", { class: `bar ${kind} ${share == null ? "unknown" : ""}`, "aria-hidden": "true" }, barFill(share));
}

function barFill(share) {
  const made = h("span");
  made.style.width = `${Math.max(0, Math.min(1, share ?? 0)) * 100}%`;
  return made;
}

export function sayBar(element, share) {
  const wide = `${Math.round(Math.max(0, Math.min(1, share ?? 0)) * 1000) / 10}%`;
  if (element.firstChild.style.width !== wide) element.firstChild.style.width = wide;
  element.classList.toggle("unknown", share == null);
}

// A command of agentctl with a button that copies it: what a page may not do, a terminal does.
export function command(text) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${text}`, onclick: copy }, "copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "copied");
    } catch {
      getSelection().selectAllChildren(code); // without a secure context there is no clipboard
      say(button, "selected");
    }
    setTimeout(() => say(button, "copy"), 1500);
  }
  const code = h("code", {}, text);
  return h("span", { class: "command" }, code, button);
}

// A refusal of the agent in its three lines.
export function refusal(error) {
  const said = error.said ?? { what: "The agent did not answer", why: error.message, next: "" };
  return h(
    "div",
    { class: "refused" },
    h("p", {}, said.what),
    h("p", {}, said.why),
    said.next && h("p", {}, "Next: ", said.next),
  );
}

const ROW = 34;
let grids = 0;

// Rows as a grid for eyes, keyboards and screen readers. A column: {id, title, width, rank, text(row), sort(row), number,
// grow, chip, bar(row), link(row)}; columns of a higher rank are left out first where the window is narrow.
export class Grid {
  constructor({ label, columns, scroller, open, empty, sorted, filter }) {
    Object.assign(this, { label, columns, scroller, open, empty });
    this.sorted = sorted ?? "";
    this.filter = filter ?? "";
    this.rows = new Map();
    this.texts = new WeakMap();
    this.selected = null;
    this.name = `grid${++grids}`;
    this.head = h("div", { role: "row", class: "row head" });
    this.virtual = new Virtual({
      scroller,
      height: ROW,
      make: () => this.make(),
      fill: (element, key) => this.fill(element, key),
    });
    this.virtual.el.setAttribute("role", "rowgroup");
    this.none = h("p", { class: "empty", hidden: true });
    this.grid = h(
      "div",
      { role: "grid", class: "grid", tabindex: "0", "aria-label": label },
      h("div", { role: "rowgroup", class: "heads" }, this.head),
      this.virtual.el,
    );
    this.el = h("div", { class: "listing" }, this.grid, this.none);
    this.virtual.el.addEventListener("click", (event) => this.clicked(event));
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this.el);
    this.fit();
  }

  close() {
    this.virtual.close();
    this.sizes.disconnect();
  }

  // Choose the columns that have room, by their rank.
  fit() {
    const room = (this.el.clientWidth || this.scroller.clientWidth || 900) - 16;
    let left = room;
    const chosen = new Set();
    for (const column of [...this.columns].sort((a, b) => a.rank - b.rank)) {
      if (column.rank > 0 && column.width > left) break;
      chosen.add(column);
      left -= column.width;
    }
    const visible = this.columns.filter((column) => chosen.has(column));
    if (this.visible?.map((each) => each.id).join() === visible.map((each) => each.id).join()) return;
    this.visible = visible;
    const grows =
      visible.find((column) => column.grow) ??
      visible.find((column) => column.stretch) ??
      visible.findLast((column) => !column.number);
    const track = (column) => (column === grows ? `minmax(${column.width}px, 1fr)` : `${column.width}px`);
    this.el.style.setProperty("--columns", visible.map(track).join(" "));
    this.grid.setAttribute("aria-colcount", this.columns.length);
    this.heads();
    this.virtual.shown.forEach((element) => element.remove());
    this.virtual.shown.clear();
    this.virtual.draw(true);
  }

  heads() {
    const [by, down] = this.order();
    this.head.replaceChildren(
      ...this.visible.map((column) => {
        const is = column.id === by;
        const sort = h(
          "button",
          { type: "button", title: `Sort by ${column.title}`, onclick: () => this.sort(column) },
          column.title,
          is && h("span", { "aria-hidden": "true" }, down ? " ↓" : " ↑"),
        );
        return h(
          "div",
          {
            role: "columnheader",
            class: column.number ? "number" : "",
            "aria-colindex": this.columns.indexOf(column) + 1,
            "aria-sort": is ? (down ? "descending" : "ascending") : "none",
          },
          sort,
        );
      }),
    );
  }

  order() {
    return [this.sorted.replace("-", ""), this.sorted.startsWith("-")];
  }

  sort(column) {
    const [by, down] = this.order();
    const first = column.number ? "-" : "";
    this.sorted =
      by !== column.id
        ? first + column.id
        : down
          ? column.number
            ? ""
            : column.id
          : column.number
            ? ""
            : `-${column.id}`;
    if (by === column.id && !down && column.number) this.sorted = "";
    this.heads();
    this.arrange();
    this.onsort?.(this.sorted);
  }

  set(rows) {
    this.rows = rows;
    this.arrange();
  }

  // Which rows are shown, in which order.
  arrange() {
    const matches = this.filter ? matcher(this.filter) : null;
    let found = [...this.rows];
    if (matches) found = found.filter(([, row]) => matches(row, this.words(row)));
    const [by, down] = this.order();
    const column = this.columns.find((each) => each.id === by);
    if (column) {
      const value = column.sort ?? column.text;
      const of = new Map(found.map(([key, row]) => [key, value(row)]));
      const unknown = (each) => each == null || each === "";
      const compare = (a, b) =>
        typeof a === "number" && typeof b === "number"
          ? a - b
          : String(a).localeCompare(String(b), "en", { numeric: true });
      found.sort(([a], [b]) => {
        const [left, right] = [of.get(a), of.get(b)];
        if (unknown(left) || unknown(right)) return unknown(left) - unknown(right); // what is not known comes last
        return down ? compare(right, left) : compare(left, right);
      });
    }
    const keys = found.map(([key]) => key);
    this.grid.setAttribute("aria-rowcount", keys.length + 1);
    this.virtual.set(keys);
    const why = this.rows.size ? "Nothing matches the filter." : this.empty();
    say(this.none, why);
    this.none.hidden = keys.length > 0;
    this.oncount?.(keys.length, this.rows.size);
  }

  words(row) {
    let found = this.texts.get(row);
    if (found === undefined) this.texts.set(row, (found = this.columns.map((column) => column.text(row)).join(" ")));
    return found;
  }

  make() {
    const cells = this.visible.map((column) => {
      const cell = h("div", {
        role: "gridcell",
        class: column.number ? "number" : "",
        "aria-colindex": this.columns.indexOf(column) + 1,
      });
      if (column.bar) cell.append(bar(null), h("span"));
      else if (column.chip) cell.append(h("span"));
      else if (column.link) cell.append(h("a", { tabindex: "-1" }));
      return cell;
    });
    return h("div", { role: "row", class: "row" }, cells);
  }

  fill(element, key) {
    const row = this.rows.get(key);
    if (!row) return;
    element.dataset.key = key;
    element.id = this.id(key);
    element.setAttribute("aria-rowindex", (this.virtual.places.get(key) ?? 0) + 2);
    element.setAttribute("aria-selected", key === this.selected);
    this.visible.forEach((column, at) => {
      const cell = element.children[at],
        text = column.text(row);
      const shown = text == null || text === "" ? (column.blank ?? "") : String(text);
      if (column.bar) {
        sayBar(cell.firstChild, column.bar(row));
        say(cell.lastChild, shown);
      } else if (column.chip) {
        sayChip(cell.firstChild, shown);
      } else if (column.link) {
        say(cell.firstChild, shown);
        const path = column.link(row);
        if (path) cell.firstChild.href = path;
        else cell.firstChild.removeAttribute("href");
      } else {
        say(cell, shown);
        if (column.grow) cell.title = shown;
      }
      if (column.tone) cell.dataset.tone = column.tone(row);
    });
  }

  id(key) {
    return `${this.name}-${key}`.replace(/\s/g, "_");
  }

  clicked(event) {
    const line = event.target.closest(".row");
    if (!line || event.target.closest("a") || String(getSelection())) return;
    this.select(line.dataset.key);
    this.enter();
  }

  select(key) {
    const before = this.virtual.shown.get(this.selected);
    this.selected = key;
    before?.setAttribute("aria-selected", "false");
    this.virtual.reveal(key, 84);
    this.virtual.shown.get(key)?.setAttribute("aria-selected", "true");
    this.grid.setAttribute("aria-activedescendant", this.id(key));
  }

  move(by) {
    const keys = this.virtual.keys;
    if (!keys.length) return;
    const at = this.virtual.places.get(this.selected) ?? (by > 0 ? -1 : keys.length);
    const next = Math.max(0, Math.min(keys.length - 1, at + by));
    this.select(keys[next]);
  }

  enter() {
    const row = this.rows.get(this.selected);
    const path = row && this.open?.(row);
    if (path) location.hash = path;
  }
}
