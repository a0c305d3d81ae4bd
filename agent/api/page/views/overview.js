// The rack at a glance: what runs, what needs somebody, and a map with a tile for each GPU.
import { bytes, count, h, percent, plural, say, seconds } from "../lib/dom.js";
import { GPU_HELP, GPU_STATES, gpuState, hostNote, hostTiles, natural, tally, tallyWords } from "../lib/facts.js";
import { bar, heading, sayBar } from "../lib/widgets.js";
import { Virtual } from "../lib/virtual.js";

const CARD_PX = 176;
const TALL_PX = 74;
const NAMED_MAX = 5;

function figure(title, path) {
  const value = h("span", { class: "value" }, "–"),
    of = h("span", { class: "of" }),
    more = h("span", { class: "more" });
  return {
    el: h("a", { class: "figure", href: path }, h("span", { class: "title" }, title), h("span", {}, value, of), more),
    value,
    of,
    more,
  };
}

export class Overview {
  constructor(page) {
    this.page = page;
    this.model = page.model;
    this.only = page.query.get("gpu") ?? "";
    this.figures = {
      gpus: figure("GPUs in use", "#/gpus"),
      hosts: figure("Hosts alive", "#/hosts"),
      jobs: figure("Jobs running", "#/jobs"),
      queue: figure("Jobs waiting", "#/jobs?q=state:queued"),
      memory: figure("Memory lent", "#/memory"),
      leader: figure("Leader", "#/gossip"),
    };
    this.needs = h("ul", { class: "needs" });
    this.legend = h("div", { class: "legend", role: "group", "aria-label": "Show GPUs that are" });
    this.map = new Virtual({
      scroller: page.main,
      height: TALL_PX,
      make: () => this.card(),
      fill: (element, key) => this.fill(element, key),
      columns: (wide) => Math.max(1, Math.floor(wide / CARD_PX)),
    });
    this.none = h("p", { class: "empty", hidden: true });
    this.where = h("span", { class: "counted" });
    this.el = h(
      "section",
      { class: "view" },
      heading("Overview"),
      h(
        "div",
        { class: "figures" },
        Object.values(this.figures).map((each) => each.el),
      ),
      h(
        "section",
        { class: "panel", "aria-labelledby": "needs-title" },
        h("h2", { id: "needs-title" }, "What needs you"),
        this.needs,
      ),
      h(
        "section",
        { "aria-labelledby": "map-title", class: "map" },
        h("div", { class: "subheading" }, h("h2", { id: "map-title" }, "Rack map"), this.where, this.legend),
        this.none,
        this.map.el,
      ),
    );
    this.buttons = {};
    for (const [state, { letter, words }] of Object.entries(GPU_STATES)) {
      const number = h("span", { class: "n" });
      const button = h(
        "button",
        { type: "button", title: GPU_HELP[state], "aria-pressed": "false", onclick: () => this.pick(state) },
        h("span", { class: `tile ${state}`, "aria-hidden": "true" }, letter),
        words,
        number,
      );
      this.buttons[state] = { button, number };
      this.legend.append(button);
    }
    this.selected = null;
    this.draw();
  }

  pick(state) {
    this.only = this.only === state ? "" : state;
    this.page.setQuery({ gpu: this.only });
    this.draw();
  }

  card() {
    return h(
      "a",
      { class: "card" },
      h("span", { class: "top" }, h("span", { class: "name" }), h("span", { class: "word" })),
      h("span", { class: "tiles", "aria-hidden": "true" }),
      bar(null, "thin"),
      h("span", { class: "unseen" }),
    );
  }

  fill(element, key) {
    const host = this.model.rows("hosts").get(key);
    if (!host) return;
    const tiles = this.tiles.get(key) ?? [];
    const [top, row, memory, unseen] = element.children;
    if (element.dataset.key !== key) element.href = `#/host/${encodeURIComponent(key)}`;
    element.dataset.key = key;
    element.classList.toggle("off", host.state !== "alive");
    say(top.firstChild, key);
    say(
      top.lastChild,
      host.state !== "alive"
        ? host.state
        : host.leads
          ? "leads"
          : host.drained_by
            ? "drained"
            : host.cordoned_by
              ? "cordoned"
              : "",
    );
    const now = tiles.join();
    if (row.dataset.now !== now) {
      row.dataset.now = now;
      if (row.children.length !== tiles.length) row.replaceChildren(...tiles.map(() => h("span")));
      tiles.forEach((state, at) => {
        row.children[at].className = `tile ${state}`;
        say(row.children[at], GPU_STATES[state].letter);
      });
      if (!tiles.length) row.textContent = host.gpus_total == null ? "GPUs not known" : "no GPU";
    }
    const share = this.memory(key);
    sayBar(memory, share);
    const note = hostNote(host);
    const seen = host.state !== "alive" ? "" : "alive, ";
    say(
      unseen,
      `: ${seen}${tallyWords(tally(tiles)) || "no GPU known"}; GPU memory ${percent(share)}${note ? `; ${note}` : ""}`,
    );
  }

  memory(key) {
    const gpus = this.model.by.gpus.get(key);
    const total = gpus?.reduce((sum, gpu) => sum + gpu.memory_total_bytes, 0);
    return total ? gpus.reduce((sum, gpu) => sum + gpu.memory_used_bytes, 0) / total : null;
  }

  draw() {
    const { model } = this,
      known = model.tables;
    const hosts = [...model.rows("hosts").values()];
    const alive = hosts.filter((host) => host.state === "alive").length;
    this.tiles = new Map(hosts.map((host) => [host.host, hostTiles(host, model.by.gpus.get(host.host))]));
    const all = [...this.tiles.values()].flat(),
      found = tally(all);
    const used = ["busy", "held", "idle", "shared"].reduce((sum, state) => sum + (found[state] ?? 0), 0);
    const jobs = [...model.rows("jobs").values()];
    const running = jobs.filter((job) => job.state === "running" || job.state === "stopping"),
      queued = jobs.filter((job) => job.state === "queued" || job.state === "placing");
    const put = (name, value, more, sure) => {
      const [first, ...rest] = value.split(" of ");
      say(this.figures[name].value, sure ? first : "–");
      say(this.figures[name].of, sure && rest.length ? ` of ${rest[0]}` : "");
      say(this.figures[name].more, sure ? more : "not known yet");
    };
    put(
      "gpus",
      `${count(used)} of ${count(all.length)}`,
      [found.free ? `${count(found.free)} free` : "none free", found.idle && `${found.idle} idle but held`]
        .filter(Boolean)
        .join(", "),
      known.hosts.known && known.gpus.known,
    );
    put(
      "hosts",
      `${count(alive)} of ${count(hosts.length)}`,
      alive === hosts.length ? "all of them" : `${hosts.length - alive} not alive`,
      known.hosts.known,
    );
    put(
      "jobs",
      count(running.length),
      `on ${plural(
        running.reduce((sum, job) => sum + job.gpus, 0),
        "GPU",
      )}`,
      known.jobs.known,
    );
    const waits = queued.length
      ? Math.max(...queued.map((job) => job.times.for_s + Math.max(0, model.now_s() - job.as_of)))
      : 0;
    put(
      "queue",
      count(queued.length),
      queued.length
        ? `${plural(
            queued.reduce((sum, job) => sum + job.gpus, 0),
            "GPU",
          )} wanted, longest ${seconds(waits)}`
        : "nobody waits",
      known.jobs.known,
    );
    const lent = [...model.by.lent.values()].reduce((sum, each) => sum + each, 0);
    put(
      "memory",
      bytes(lent),
      lent ? `${plural(model.rows("slabs").size, "slab")}, ${plural(model.by.lent.size, "lender")}` : "nothing is lent",
      known.slabs.known,
    );
    const leader = hosts.find((host) => host.leads);
    put(
      "leader",
      leader?.host ?? "none",
      leader ? "decides who runs" : "nothing can be changed now",
      known.hosts.known,
    );
    this.attention(hosts, jobs);
    for (const [state, { button, number }] of Object.entries(this.buttons)) {
      say(number, count(found[state] ?? 0));
      button.hidden = !found[state] && state !== this.only;
      button.setAttribute("aria-pressed", this.only === state);
    }
    const keys = hosts
      .filter((host) => !this.only || this.tiles.get(host.host).includes(this.only))
      .map((host) => host.host)
      .sort(natural);
    say(
      this.where,
      this.only ? `${count(keys.length)} of ${plural(hosts.length, "host")}` : plural(hosts.length, "host"),
    );
    const before = this.map.keys;
    if (before.length === keys.length && before.every((key, at) => key === keys[at])) this.map.refresh();
    else this.map.set(keys);
    say(
      this.none,
      known.hosts.known ? (this.only ? "No GPU is in that state now." : "No host is known.") : "Asking the agent ...",
    );
    this.none.hidden = keys.length > 0;
  }

  attention(hosts, jobs) {
    const found = [];
    const add = (words, path, kind) => found.push({ words, path, kind });
    for (const host of hosts) {
      for (const each of host.troubles ?? [])
        add(`${host.host}: ${each.what}. Next: ${each.next}`, `#/host/${encodeURIComponent(host.host)}`, "bad");
      if (host.state === "gone" || host.state === "suspect")
        add(
          `${host.host} is ${host.state}${host.suspected_by ? `; ${host.suspected_by} suspected it first` : ""}`,
          `#/host/${encodeURIComponent(host.host)}`,
          host.state === "gone" ? "bad" : "warning",
        );
      if (host.no_room) add(`${host.host}: ${host.no_room}`, `#/host/${encodeURIComponent(host.host)}`, "bad");
      if (host.plugins_failed?.length)
        add(
          `${host.host}: plugin ${host.plugins_failed.join(", ")} failed`,
          `#/host/${encodeURIComponent(host.host)}`,
          "bad",
        );
    }
    const states = tally([...this.model.rows("gpus").values()].map(gpuState));
    if (states.sick) add(`${plural(states.sick, "GPU")} sick`, "#/?gpu=sick", "bad");
    if (states.idle) add(`${plural(states.idle, "GPU")} held and not used`, "#/?gpu=idle", "warning");
    if (states.foreign)
      add(`${plural(states.foreign, "GPU")} used by processes that no job started`, "#/?gpu=foreign", "warning");
    for (const job of jobs) if (job.losses?.stuck) add(`${job.id}: ${job.losses.stuck}`, `#/job/${job.id}`, "warning");
    found.sort((a, b) => (a.kind === "bad" ? 0 : 1) - (b.kind === "bad" ? 0 : 1));
    const now = JSON.stringify(found.slice(0, NAMED_MAX)) + found.length + this.model.tables.hosts.known;
    if (now === this.said) return;
    this.said = now;
    const shown = found
      .slice(0, NAMED_MAX)
      .map(({ words, path, kind }) => h("li", { class: kind }, h("a", { href: path }, words)));
    if (found.length > NAMED_MAX) shown.push(h("li", {}, `and ${found.length - NAMED_MAX} more: see Hosts and GPUs`));
    if (!found.length)
      shown.push(
        h(
          "li",
          { class: "well" },
          this.model.tables.hosts.known
            ? "Nothing: all hosts that are known are well, and no GPU is sick or held without use."
            : "Asking the agent ...",
        ),
      );
    this.needs.replaceChildren(...shown);
  }

  update(changed) {
    if (!["hosts", "gpus", "jobs", "slabs"].some((name) => changed.has(name))) return;
    clearTimeout(this.timer);
    const wait = this.model.rows("gpus").size < 500 ? 0 : 200 - (performance.now() - (this.drawn ?? 0));
    const draw = () => {
      this.drawn = performance.now();
      this.draw();
    };
    if (wait <= 0) draw();
    else this.timer = setTimeout(draw, wait);
  }

  move(by) {
    const { keys } = this.map;
    if (!keys.length) return;
    const at = keys.indexOf(this.selected);
    this.selected = keys[at < 0 ? 0 : Math.max(0, Math.min(keys.length - 1, at + by))];
    this.map.reveal(this.selected);
    this.map.shown.get(this.selected)?.focus({ preventScroll: true });
  }

  enter() {
    if (this.selected) location.hash = `#/host/${encodeURIComponent(this.selected)}`;
  }

  escape() {
    if (!this.only) return false;
    this.pick(this.only);
    return true;
  }

  close() {
    clearTimeout(this.timer);
    this.map.close();
  }
}
