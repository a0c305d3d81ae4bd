// What hosts hear of one another, who suspects whom, who leads, and how far each voter has the log.
import { bytes, count, h, plural, seconds } from "../lib/dom.js";
import { natural } from "../lib/facts.js";
import { Grid, chip, gaps, heading, quiet } from "../lib/widgets.js";

const LINES_MAX = 12;

export class GossipView {
  constructor(page) {
    this.page = page;
    this.model = page.model;
    this.gaps = h("p", { class: "alarm", role: "status", hidden: true });
    this.facts = h("dl", { class: "facts" });
    this.voters = h("div");
    this.suspects = h("div");
    this.grid = new Grid({
      label: "Gossip of each host",
      scroller: page.main,
      open: (row) => `#/host/${encodeURIComponent(row.host)}`,
      sorted: page.query.get("sort") ?? "",
      empty: () => (this.model.tables.gossip.known ? "No host says what it gossips." : "Asking the agent ..."),
      columns: [
        {
          id: "host",
          title: "Host",
          width: 130,
          rank: 0,
          text: (r) => r.host,
          link: (r) => `#/host/${encodeURIComponent(r.host)}`,
        },
        {
          id: "health",
          title: "Own health",
          width: 120,
          rank: 1,
          text: (r) => (r.alone ? "hears nobody" : r.health ? `slow (${r.health})` : "good"),
          sort: (r) => r.health,
        },
        {
          id: "probes",
          title: "Probes failed",
          width: 130,
          rank: 2,
          number: true,
          text: (r) => `${count(r.probes_failed)} of ${count(r.probes)}`,
          sort: (r) => r.probes_failed,
        },
        {
          id: "refuted",
          title: "Refuted",
          width: 90,
          rank: 4,
          number: true,
          text: (r) => count(r.refutations),
          sort: (r) => r.refutations,
        },
        {
          id: "stalls",
          title: "Stalls",
          width: 80,
          rank: 3,
          number: true,
          text: (r) => count(r.stalls),
          sort: (r) => r.stalls,
        },
        {
          id: "longest",
          title: "Longest stall",
          width: 116,
          rank: 6,
          number: true,
          text: (r) => seconds(r.stalled_s),
          sort: (r) => r.stalled_s,
        },
        {
          id: "sent",
          title: "Sent",
          width: 96,
          rank: 7,
          number: true,
          text: (r) => bytes(r.sent_bytes),
          sort: (r) => r.sent_bytes,
        },
        {
          id: "heard",
          title: "Received",
          width: 96,
          rank: 8,
          number: true,
          text: (r) => bytes(r.received_bytes),
          sort: (r) => r.received_bytes,
        },
        {
          id: "dropped",
          title: "Dropped",
          width: 120,
          rank: 5,
          grow: true,
          text: (r) =>
            Object.entries(r.dropped ?? {})
              .map(([why, n]) => `${count(n)} ${why}`)
              .join(", ") || "none",
          sort: (r) => Object.values(r.dropped ?? {}).reduce((a, b) => a + b, 0),
        },
      ],
    });
    this.el = h(
      "section",
      { class: "view" },
      heading(
        "Gossip and log",
        h("a", { class: "quiet-link", href: "/v1/gossip", target: "_blank", rel: "noopener" }, "JSON"),
      ),
      this.gaps,
      this.facts,
      h(
        "div",
        { class: "columns" },
        h(
          "section",
          { class: "panel", "aria-labelledby": "voters-title" },
          h("h2", { id: "voters-title" }, "Who votes"),
          this.voters,
        ),
        h(
          "section",
          { class: "panel", "aria-labelledby": "suspects-title" },
          h("h2", { id: "suspects-title" }, "Who suspects whom"),
          this.suspects,
        ),
      ),
      h("h2", {}, "Gossip"),
      this.grid.el,
    );
    this.draw();
  }

  draw() {
    const { model } = this,
      leader = model.rows("leader").get("leader");
    const since_s = leader?.since_s == null ? null : leader.since_s + Math.max(0, model.now_s() - leader.as_of);
    gaps(this.gaps, model.tables.gossip.unanswered);
    const fact = (term, value, more) =>
      h("div", {}, h("dt", {}, term), h("dd", {}, value, more && h("span", { class: "more" }, more)));
    this.facts.replaceChildren(
      fact(
        "Leader",
        leader ? (leader.leader ?? "none now") : "not known",
        since_s != null && `for ${seconds(since_s)}, term ${leader.term}`,
      ),
      fact(
        "Log applied here",
        leader ? `entry ${count(leader.applied_index)}` : "not known",
        leader && plural(leader.voters.length, "voter"),
      ),
      fact(
        "Hosts alive",
        count([...model.rows("hosts").values()].filter((host) => host.state === "alive").length),
        `of ${count(model.rows("hosts").size)}`,
      ),
    );
    this.drawVoters();
    this.drawSuspects();
    this.grid.set(new Map([...model.rows("gossip")].sort(([a], [b]) => natural(a, b))));
  }

  drawVoters() {
    const rows = [...this.model.rows("voters").values()];
    if (!rows.length)
      return this.voters.replaceChildren(
        quiet(this.model.tables.voters.known ? "No host votes." : "Asking the agent ..."),
      );
    const newest = Math.max(...rows.map((row) => row.entry));
    const line = (row) => {
      const lag =
        row.part === "away" || row.part === "silent"
          ? "not known"
          : newest - row.entry
            ? plural(newest - row.entry, "entry").replace("entrys", "entries")
            : "none";
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, h("a", { href: `#/host/${encodeURIComponent(row.host)}` }, row.host)),
        h("td", {}, row.leads ? `${row.part}, leads` : row.part),
        h("td", { class: "number" }, row.entry ? count(row.entry) : "not known"),
        h("td", { class: "number" }, lag),
        h("td", {}, row.notes.join("; ")),
      );
    };
    this.voters.replaceChildren(
      h(
        "div",
        { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Who votes" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", { scope: "col" }, "Host"),
              h("th", { scope: "col" }, "Part"),
              h("th", { scope: "col", class: "number" }, "Entry"),
              h("th", { scope: "col", class: "number" }, "Behind"),
              h("th", { scope: "col" }, "Note"),
            ),
          ),
          h("tbody", {}, rows.map(line)),
        ),
      ),
    );
  }

  drawSuspects() {
    const found = [];
    for (const row of this.model.rows("gossip").values())
      for (const each of row.suspects ?? []) found.push({ ...each, told: row.host });
    const hosts = [...this.model.rows("hosts").values()].filter((host) => host.state !== "alive");
    const of = new Map();
    for (const each of found) of.set(each.host, [...(of.get(each.host) ?? []), each]);
    const lines = [...of].map(([host, said]) =>
      h(
        "li",
        {},
        h("strong", {}, host),
        ` is suspected by ${[...new Set(said.map((each) => each.by ?? "an unknown host"))].join(", ")}; ${plural(said.length, "host")} heard of it: ${said
          .slice(0, 6)
          .map((each) => each.told)
          .join(", ")}`,
      ),
    );
    for (const host of hosts)
      if (!of.has(host.host))
        lines.push(
          h(
            "li",
            {},
            h("a", { href: `#/host/${encodeURIComponent(host.host)}` }, host.host),
            " ",
            chip(host.state),
            host.suspected_by && ` ${host.suspected_by} suspected it first`,
          ),
        );
    const more = lines.length - LINES_MAX;
    if (more > 0) lines.splice(LINES_MAX, more, h("li", {}, `and ${plural(more, "host")} more: see Hosts`));
    this.suspects.replaceChildren(
      lines.length ? h("ul", { class: "plain" }, lines) : quiet("Nobody is suspected, and no host is gone."),
    );
  }

  update(changed) {
    if (!["gossip", "voters", "hosts", "leader"].some((name) => changed.has(name))) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.draw(), 150);
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
    this.grid.close();
  }
}
