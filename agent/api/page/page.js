// The page: its header, the views that the address names (#/jobs, #/job/j1 ...), and the keys. docs/guides/page.md.
import { clock, h, read, say } from "./lib/dom.js";
import { Model } from "./lib/model.js";
import { Stream } from "./lib/stream.js";
import { setTones } from "./lib/widgets.js";
import { gpusView, hostsView, jobsView, tenantsView, tensorsView } from "./views/lists.js";
import { Overview } from "./views/overview.js";

const TABLES = ["hosts", "gpus", "jobs", "slabs", "tenants", "quotas", "tensors", "gossip", "voters", "leader"];
const later =
  (path, name) =>
  async (page, ...more) =>
    new (await import(path))[name](page, ...more);
const VIEWS = [
  ["", "Overview", (page) => new Overview(page)],
  ["hosts", "Hosts", hostsView],
  ["gpus", "GPUs", gpusView],
  ["jobs", "Jobs", jobsView],
  ["tenants", "Tenants", tenantsView],
  ["memory", "Memory", later("./views/memory.js", "MemoryView")],
  ["tensors", "Tensors", tensorsView],
  ["gossip", "Gossip and log", later("./views/gossip.js", "GossipView")],
  ["events", "Events", later("./views/events.js", "EventsView")],
];
const ONE = { job: later("./views/job.js", "JobView"), host: later("./views/host.js", "HostView") };
const ABOVE = { job: "jobs", host: "hosts" };
const KEYS = [
  ["/", "go to the filter"],
  ["j  k", "next, previous row"],
  ["Enter", "open the row"],
  ["Esc", "leave the filter, or go up"],
  ["1 … 9", "the views, in their order"],
  ["?", "this help"],
];

class Page {
  constructor() {
    this.model = new Model(TABLES);
    this.main = document.getElementById("main");
    this.dialog = document.getElementById("dialog");
    this.view = null;
    this.cut_s = null;
    this.keys = this.stored("keys") !== "off";
    this.links = VIEWS.map(([name, title], at) =>
      h("a", { href: `#/${name}`, "aria-keyshortcuts": String(at + 1) }, title),
    );
    document.getElementById("nav").append(...this.links);
    document.getElementById("help-button").addEventListener("click", () => this.help());
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.key(event));
    this.model.listen((changed) => {
      if (changed.has("hosts")) this.head();
      this.view?.update(changed);
    });
    this.stream = new Stream(
      [...TABLES, "happened"],
      (kind, said) => this.model.take(kind, said),
      (state, words) => this.told(state, words),
    );
    setInterval(() => this.tick(), 1000);
  }

  // A word that this browser keeps; none where it keeps nothing.
  stored(name, value) {
    try {
      if (value === undefined) return localStorage.getItem(`covey-${name}`);
      localStorage.setItem(`covey-${name}`, value);
    } catch {
      // private windows may keep nothing
    }
    return null;
  }

  async start() {
    this.stream.open();
    const [tones, leader] = await Promise.allSettled([read("/states.json"), read("/v1/leader")]);
    if (tones.value) setTones(tones.value); // states are words all the same
    this.model.host = leader.value?.host ?? "";
    await this.route();
    this.head();
  }

  get query() {
    return new URLSearchParams(location.hash.split("?")[1] ?? "");
  }

  // Keep what a view was asked for in the address, so that it can be sent to somebody.
  setQuery(fields) {
    const kept = new URLSearchParams(this.query);
    for (const [name, value] of Object.entries(fields)) value ? kept.set(name, value) : kept.delete(name);
    const words = kept.toString();
    history.replaceState(null, "", `${location.hash.split("?")[0] || "#/"}${words ? `?${words}` : ""}`);
  }

  async route() {
    if (location.hash.startsWith("#job=")) return location.replace(`#/job/${location.hash.slice(5)}`);
    let path = "";
    try {
      path = decodeURIComponent(location.hash.replace(/^#\/?/, "").split("?")[0]);
    } catch {
      // somebody typed it: the overview
    }
    const [name, ...rest] = path.split("/");
    const at = Math.max(
      0,
      VIEWS.findIndex(([each]) => each === (ABOVE[name] ?? name)),
    );
    const turn = (this.turn = {});
    const made = ONE[name] && rest.length ? ONE[name] : VIEWS[at][2];
    this.view?.close();
    this.view = null;
    this.up = ONE[name] && rest.length ? `#/${ABOVE[name]}` : at ? "#/" : "";
    this.links.forEach((link, each) =>
      each === at ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"),
    );
    this.links[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    this.main.scrollTop = 0;
    let view;
    try {
      view = await made(this, rest.join("/"));
      this.lost = false;
    } catch (error) {
      this.lost = true;
      this.main.replaceChildren(
        h("p", { class: "alarm", role: "alert" }, `This view could not be loaded: ${error.message}`),
      );
      return;
    }
    if (turn !== this.turn) return view.close();
    this.view = view;
    const title = view.el.querySelector("h1");
    document.title = `${title.textContent} · Covey`;
    this.main.replaceChildren(view.el);
    view.grid?.fit?.();
    view.update(new Set([...TABLES, "happened"]));
    if (this.moved) title.focus({ preventScroll: true });
    this.moved = true;
  }

  // ---- the header ----

  told(state, words) {
    if (state === "live") {
      this.cut_s = null;
      if (!this.view && this.lost) this.route(); // its script did not come while the agent was away
    } else if (state !== "paused") this.cut_s ??= this.stream.heard_s ?? Date.now() / 1000;
    this.state = state;
    this.words = words;
    this.head();
  }

  head() {
    const { model } = this,
      hosts = [...model.rows("hosts").values()];
    const alive = hosts.filter((host) => host.state === "alive").length,
      leader = hosts.find((host) => host.leads);
    const known = model.tables.hosts.known;
    if (known)
      say(
        document.getElementById("summary"),
        `as ${model.host || "this agent"} knows: ${alive} of ${hosts.length} hosts alive, ${leader ? `${leader.host} leads` : "no leader now"}`,
      );
    const link = document.getElementById("link");
    link.className = this.state ?? "";
    const since = this.cut_s ? clock(this.cut_s) : "";
    const said =
      {
        live: "live",
        cut: known ? `out of date since ${since}` : "the agent does not answer",
        refused: known ? `out of date since ${since}` : "refused",
        paused: "paused",
      }[this.state] ?? "connecting ...";
    say(link, said);
    link.title = this.words || "one stream from the agent; it pauses while this tab is hidden";
    let trouble = document.getElementById("trouble");
    if (this.state === "cut" || this.state === "refused") {
      if (!trouble) document.getElementById("shell").before((trouble = h("p", { id: "trouble", role: "alert" })));
      say(
        trouble,
        `${known ? `What is shown here is out of date since ${since}` : "Nothing is known yet"}: ${this.words}. It is tried again by itself.`,
      );
    } else trouble?.remove();
  }

  tick() {
    if (!document.hidden) this.view?.tick?.();
  }

  // ---- keys ----

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.dialog.open) return;
    const field = event.target.closest("input, select, textarea");
    if (event.key === "Escape") return this.escape(field);
    if (field) {
      if (event.key === "Enter" && field.classList.contains("filter") && !field.form) {
        field.blur();
        this.view?.move(1);
      }
      return;
    }
    const grid = event.target.closest(".grid");
    const arrows = grid && { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 }[event.key];
    if (arrows) return this.did(event, () => this.view.move(arrows));
    if (
      event.key === "Enter" &&
      (event.target === document.body || event.target.closest(".grid, h1, main") === event.target)
    )
      return this.did(event, () => this.view?.enter?.());
    if (!this.keys) return;
    if (event.key === "/") return this.did(event, () => document.querySelector("main .filter")?.focus());
    if (event.key === "j" || event.key === "k")
      return this.did(event, () => this.view?.move(event.key === "j" ? 1 : -1));
    if (event.key === "?") return this.did(event, () => this.help());
    const at = "123456789".indexOf(event.key);
    if (event.key.length === 1 && at >= 0 && VIEWS[at]) this.did(event, () => (location.hash = `#/${VIEWS[at][0]}`));
  }

  did(event, act) {
    event.preventDefault();
    act();
  }

  escape(field) {
    if (this.view?.escape?.()) return;
    if (field) field.blur();
    else if (this.up) location.hash = this.up;
  }

  help() {
    const keys = h("input", {
      type: "checkbox",
      onchange: () => this.stored("keys", (this.keys = keys.checked) ? "on" : "off"),
    });
    keys.checked = this.keys;
    this.dialog.replaceChildren(
      h("h2", { id: "dialog-title" }, "Keys"),
      h(
        "dl",
        { class: "keys" },
        KEYS.map(([key, words]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, words))),
      ),
      h("label", {}, keys, " single keys do something"),
      h(
        "p",
        { class: "more" },
        "A filter takes words that must be there, -words that must not, and field:word. The address has what is shown: send it to somebody.",
      ),
      h("form", { method: "dialog" }, h("button", {}, "Close")),
    );
    this.dialog.showModal();
  }
}

const page = new Page();
page.start();
