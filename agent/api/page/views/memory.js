// Memory that hosts lend to one another: what each uses, lends, borrows and has to spare; slabs as a picture.
import { bytes, count, h, percent, plural, read, s, seconds } from "../lib/dom.js";
import { LENDS, natural } from "../lib/facts.js";
import { Grid, alarm, chip, gaps, heading, quiet } from "../lib/widgets.js";

const LINKS_MAX = 24; // drawn; the list below has all
const ROW_PX = 30;
const WIDEST_PX = 24; // all lines of one host together

export class MemoryView {
  constructor(page) {
    this.page = page;
    this.model = page.model;
    this.volumes = null;
    this.accounts = null;
    this.gaps = h("p", { class: "alarm", role: "status", hidden: true });
    this.figures = h("dl", { class: "facts" });
    this.picture = h("div", { class: "picture" });
    this.volumeList = h("div", { class: "cards" });
    this.budgets = h("div");
    this.hosts = h("div");
    this.grid = new Grid({
      label: "Slabs",
      scroller: page.main,
      open: (row) => `#/events?subject=${encodeURIComponent(`slab/${row.volume}/${row.index}`)}`,
      sorted: page.query.get("sort") ?? "",
      empty: () =>
        this.model.tables.slabs.known
          ? "No slab is lent. Make a volume: agentctl volume create demo 64MiB"
          : "Asking the agent ...",
      columns: [
        {
          id: "slab",
          title: "Slab",
          width: 150,
          rank: 0,
          grow: true,
          text: (r) => `${r.volume} ${r.index}${r.members > 1 ? ` (${r.member + 1} of ${r.members})` : ""}`,
        },
        { id: "state", title: "State", width: 110, rank: 1, text: (r) => r.state, chip: true },
        { id: "borrower", title: "Borrower", width: 110, rank: 3, text: (r) => r.borrower },
        { id: "lender", title: "Lender", width: 110, rank: 2, text: (r) => r.lender ?? "", blank: "on disk" },
        {
          id: "size",
          title: "Size",
          width: 90,
          rank: 4,
          number: true,
          text: (r) => bytes(r.size_bytes),
          sort: (r) => r.size_bytes,
        },
        {
          id: "pages",
          title: "Pages there",
          width: 150,
          rank: 5,
          number: true,
          text: (r) => (r.pages_written ? percent(r.pages_remote / r.pages_written) : "none written"),
          sort: (r) => r.pages_remote,
        },
        {
          id: "rate",
          title: "Requests/s",
          width: 140,
          rank: 6,
          number: true,
          text: (r) => r.requests_per_s.toFixed(1),
          sort: (r) => r.requests_per_s,
        },
      ],
    });
    this.el = h(
      "section",
      { class: "view" },
      heading("Memory", h("a", { class: "quiet-link", href: "/v1/slabs", target: "_blank", rel: "noopener" }, "JSON")),
      this.gaps,
      this.figures,
      h(
        "div",
        { class: "columns" },
        h(
          "section",
          { class: "panel", "aria-labelledby": "who-title" },
          h("h2", { id: "who-title" }, "Who borrows from whom"),
          this.picture,
        ),
        h(
          "section",
          { class: "panel", "aria-labelledby": "spare-title" },
          h("h2", { id: "spare-title" }, "What hosts lend"),
          this.hosts,
        ),
      ),
      h(
        "section",
        { "aria-labelledby": "volumes-title" },
        h("h2", { id: "volumes-title" }, "Volumes"),
        this.volumeList,
      ),
      this.budgets,
      h("h2", {}, "Slabs"),
      this.grid.el,
    );
    this.draw();
    this.ask();
  }

  async ask() {
    const [volumes, accounts] = await Promise.allSettled([read("/v1/volumes"), read("/v1/memory/accounts")]);
    if (this.closed) return;
    this.volumes = volumes.value ?? null;
    this.accounts = accounts.value?.data ?? null;
    this.drawVolumes();
    this.asking = setTimeout(() => this.ask(), 3000);
  }

  draw() {
    const slabs = [...this.model.rows("slabs").values()],
      hosts = [...this.model.rows("hosts").values()];
    gaps(this.gaps, this.model.tables.slabs.unanswered);
    const size = slabs[0]?.size_bytes ?? null;
    const lent = slabs.filter((slab) => slab.lender && LENDS.has(slab.state));
    const sum = (rows) => rows.reduce((total, row) => total + row.size_bytes, 0);
    const spare = hosts.reduce((total, host) => total + (host.state === "alive" ? (host.slabs_free ?? 0) : 0), 0);
    const silent = hosts.filter((host) => host.slabs_free == null).length;
    const fact = (term, value, more) =>
      h("div", {}, h("dt", {}, term), h("dd", {}, value, more && h("span", { class: "more" }, more)));
    const known = this.model.tables.slabs.known;
    this.figures.replaceChildren(
      fact("Lent", known ? bytes(sum(lent)) : "not known yet", plural(lent.length, "slab")),
      fact(
        "On disk only",
        known ? bytes(sum(slabs.filter((slab) => !slab.lender))) : "not known yet",
        "no lender has these slabs",
      ),
      fact(
        "Spare",
        size ? bytes(spare * size) : plural(spare, "slab"),
        `on hosts that are alive${silent ? `; ${plural(silent, "host")} did not say` : ""}`,
      ),
      fact(
        "On the way",
        known
          ? count(
              slabs.filter((slab) =>
                ["asking", "moving", "reopening", "filling", "recovering", "lost"].includes(slab.state),
              ).length,
            )
          : "not known yet",
        "asked for, moving, or reopening",
      ),
    );
    this.drawPicture(lent);
    this.drawHosts(hosts, size);
    this.grid.set(new Map(this.model.rows("slabs")));
  }

  // Borrowers on the left, lenders on the right; a line is as wide as the memory that it stands for.
  drawPicture(lent) {
    const pairs = new Map();
    for (const slab of lent) {
      const key = `${slab.borrower}\n${slab.lender}`;
      const found = pairs.get(key) ?? { from: slab.borrower, to: slab.lender, bytes: 0, slabs: 0, rate: 0 };
      found.bytes += slab.size_bytes;
      found.slabs += 1;
      found.rate += slab.requests_per_s;
      pairs.set(key, found);
    }
    const all = [...pairs.values()].sort((a, b) => b.bytes - a.bytes),
      links = all.slice(0, LINKS_MAX);
    const now = JSON.stringify(links.map((each) => [each.from, each.to, each.bytes]));
    if (now === this.drawn) return;
    this.drawn = now;
    if (!links.length) return this.picture.replaceChildren(quiet("No memory is lent now."));
    const left = [...new Set(links.map((each) => each.from))].sort(natural),
      right = [...new Set(links.map((each) => each.to))].sort(natural);
    const tall = Math.max(left.length, right.length) * ROW_PX + 8;
    const y = (names, name) => ((names.indexOf(name) + 0.5) * tall) / names.length;
    const total = (side, name) => links.reduce((sum, each) => sum + (each[side] === name ? each.bytes : 0), 0);
    const most = Math.max(...left.map((name) => total("from", name)), ...right.map((name) => total("to", name)));
    const wide = (amount) => (WIDEST_PX * amount) / most;
    const used = new Map(); // how much of a host's edge has its lines already
    const at = (side, names, each) => {
      const key = `${side} ${each[side]}`,
        before = used.get(key) ?? 0;
      used.set(key, before + wide(each.bytes));
      return y(names, each[side]) - wide(total(side, each[side])) / 2 + before + wide(each.bytes) / 2;
    };
    const words = links.map((each) => `${each.from} has ${bytes(each.bytes)} at ${each.to}`).join("; ");
    const svg = s(
      "svg",
      { viewBox: `0 0 420 ${tall}`, role: "img", "aria-label": words, class: "flows" },
      [...links]
        .sort((a, b) => natural(a.from, b.from) || natural(a.to, b.to))
        .map((each) => {
          const [a, b] = [at("from", left, each), at("to", right, each)];
          return s(
            "path",
            { d: `M96 ${a} C 210 ${a}, 210 ${b}, 324 ${b}`, "stroke-width": Math.max(1, wide(each.bytes) - 0.5) },
            s(
              "title",
              {},
              `${each.from} has ${bytes(each.bytes)} in ${plural(each.slabs, "slab")} at ${each.to}; ${each.rate.toFixed(1)} requests a second`,
            ),
          );
        }),
      left.map((name) => s("text", { x: 90, y: y(left, name) + 4, "text-anchor": "end" }, name)),
      right.map((name) => s("text", { x: 330, y: y(right, name) + 4 }, name)),
    );
    this.picture.replaceChildren(
      h("p", { class: "ends" }, h("span", {}, "borrowers"), h("span", {}, "lenders")),
      svg,
      all.length > links.length
        ? h("p", { class: "more" }, `The ${LINKS_MAX} widest of ${all.length}; all are in the list below.`)
        : "",
    );
  }

  drawHosts(hosts, size) {
    const rows = hosts
      .filter((host) => host.slabs_lent || host.slabs_free || this.model.by.borrowed.has(host.host))
      .sort((a, b) => (b.slabs_lent ?? 0) - (a.slabs_lent ?? 0));
    if (!rows.length) return this.hosts.replaceChildren(quiet("No host lends or borrows memory."));
    const shown = rows.slice(0, 12);
    const line = (host) => {
      const lent = host.slabs_lent,
        free = host.slabs_free,
        all = lent == null || free == null ? null : lent + free;
      const part = h("span", { class: "lent" });
      part.style.width = all ? `${(100 * lent) / all}%` : "0";
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, h("a", { href: `#/host/${encodeURIComponent(host.host)}` }, host.host)),
        h("td", {}, h("span", { class: `bar ${all == null ? "unknown" : ""}`, "aria-hidden": "true" }, part)),
        h("td", { class: "number" }, lent == null ? "not known" : size ? bytes(lent * size) : count(lent)),
        h("td", { class: "number" }, free == null ? "not known" : size ? bytes(free * size) : count(free)),
        h("td", { class: "number" }, bytes(this.model.by.borrowed.get(host.host) ?? 0)),
      );
    };
    const unit = size ? "" : " (slabs)";
    this.hosts.replaceChildren(
      h(
        "div",
        { class: "scrolls", tabindex: "0", role: "group", "aria-label": "What hosts lend" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Host", "", `Lends${unit}`, `Spare${unit}`, "Borrows"].map((title, at) =>
                h(title ? "th" : "td", { class: at > 1 ? "number" : "" }, title),
              ),
            ),
          ),
          h("tbody", {}, shown.map(line)),
        ),
      ),
      rows.length > shown.length
        ? h("p", { class: "more" }, `The first 12 of ${plural(rows.length, "host")}; all are under Hosts.`)
        : "",
    );
  }

  drawVolumes() {
    const data = this.volumes?.data;
    if (!data) return this.volumeList.replaceChildren(quiet("The volumes are not known: the agent did not answer."));
    const card = (volume) =>
      h(
        "article",
        { class: "panel" },
        h(
          "h3",
          {},
          volume.volume,
          " ",
          chip(volume.process_alive ? "on" : "failed"),
          h("span", { class: "more" }, ` of ${volume.host}`),
        ),
        h(
          "p",
          {},
          `${bytes(volume.size_bytes)}; ${volume.slabs_mapped} of ${plural(volume.slabs, "slab")} at lenders${volume.members > 1 ? `, ${volume.members} members each` : ", and on disk"}`,
        ),
        volume.latencies.length
          ? h(
              "div",
              { class: "scrolls" },
              h(
                "table",
                {},
                h(
                  "thead",
                  {},
                  h(
                    "tr",
                    {},
                    ["Last minute", "Requests", "p50", "p99"].map((title, at) =>
                      h("th", { class: at ? "number" : "", scope: "col" }, title),
                    ),
                  ),
                ),
                h(
                  "tbody",
                  {},
                  volume.latencies.map((each) =>
                    h(
                      "tr",
                      {},
                      h("th", { scope: "row" }, `${each.op}, ${each.answered}`),
                      h("td", { class: "number" }, count(each.requests)),
                      h("td", { class: "number" }, seconds(each.p50_s)),
                      h("td", { class: "number" }, seconds(each.p99_s)),
                    ),
                  ),
                ),
              ),
            )
          : h("p", { class: "more" }, "no request in the last minute"),
        volume.trouble && alarm(volume.trouble),
        volume.waits_for.map((each) => alarm(`waits for ${each.lender}: ${each.why}`)),
      );
    this.volumeList.replaceChildren(
      ...(data.length ? data.map(card) : [quiet("There is no volume. Make one: agentctl volume create demo 64MiB")]),
    );
    const accounts = this.accounts ?? [];
    const budget = (each) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, `${each.kind || "account"} ${each.name}`),
        h("td", { class: "number" }, bytes(each.used_bytes)),
        h(
          "td",
          { class: "number" },
          each.budget_bytes == null
            ? "no limit"
            : `${bytes(each.budget_bytes)} (${percent(each.used_bytes / (each.budget_bytes || 1))})`,
        ),
      );
    this.budgets.replaceChildren(
      ...(accounts.length
        ? [
            h("h2", {}, "Budgets"),
            h(
              "div",
              { class: "panel" },
              h(
                "table",
                {},
                h(
                  "thead",
                  {},
                  h(
                    "tr",
                    {},
                    ["Whose", "Uses", "Of"].map((title, at) =>
                      h("th", { class: at ? "number" : "", scope: "col" }, title),
                    ),
                  ),
                ),
                h("tbody", {}, accounts.map(budget)),
              ),
            ),
          ]
        : []),
    );
  }

  update(changed) {
    if (changed.has("slabs") || changed.has("hosts")) {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.draw(), 150);
    }
  }

  move(by) {
    this.grid.move(by);
  }

  enter() {
    this.grid.enter();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.asking);
    this.grid.close();
  }
}
