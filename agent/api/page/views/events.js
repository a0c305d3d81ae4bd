// What happened, newest first: all that this page heard since it was opened, or all that the rack knows of one subject.
import { clock, count, h, read, say } from "../lib/dom.js";
import { eventKey, subjectPath, subjectWord } from "../lib/facts.js";
import { Grid, heading, quiet, refusal } from "../lib/widgets.js";

export class EventsView {
  constructor(page) {
    this.page = page;
    this.model = page.model;
    this.subject = page.query.get("subject") ?? "";
    this.at = page.query.get("at") ?? "";
    this.story = null;
    this.counted = h("span", { class: "counted" });
    this.filter = h("input", {
      type: "search",
      class: "filter",
      placeholder: "Filter: word, -word, host:gpu1",
      "aria-label": "Filter events",
      value: page.query.get("q") ?? "",
      oninput: () => this.filtered(),
      autocomplete: "off",
      spellcheck: "false",
    });
    this.about = h("input", {
      type: "text",
      class: "filter",
      placeholder: "job, host, volume ...",
      "aria-label": "All events of",
      value: this.subject,
      autocomplete: "off",
      spellcheck: "false",
    });
    const form = h(
      "form",
      { class: "inline", onsubmit: (event) => this.asked(event) },
      h("label", {}, "All events of ", this.about),
      h("button", { type: "submit" }, "Show"),
    );
    this.state = h("div");
    this.detail = h("div", { class: "panel", hidden: true });
    this.grid = new Grid({
      label: "Events",
      scroller: page.main,
      sorted: page.query.get("sort") ?? "",
      filter: this.filter.value,
      empty: () =>
        this.subject
          ? "No event is known."
          : "Nothing was heard of yet. Ask above for all events of one job, host or volume.",
      columns: [
        { id: "time", title: "Time", width: 164, rank: 0, text: (r) => clock(r.wall_s), sort: (r) => r.wall_s },
        {
          id: "subject",
          title: "Of",
          width: 150,
          rank: 1,
          text: (r) => subjectWord(r.subject),
          link: (r) => subjectPath(r.subject),
        },
        { id: "event", title: "What", width: 210, rank: 2, text: (r) => r.event },
        { id: "host", title: "Told by", width: 100, rank: 4, text: (r) => r.host },
        { id: "reason", title: "Why", width: 180, rank: 3, grow: true, text: (r) => r.reason },
      ],
    });
    this.grid.open = (row) => {
      this.show(row);
      return "";
    };
    this.grid.oncount = (seen, all) => say(this.counted, seen === all ? count(all) : `${count(seen)} of ${count(all)}`);
    this.grid.onsort = () => this.keep();
    this.el = h(
      "section",
      { class: "view list-view" },
      heading("Events", this.counted, this.filter, form),
      this.state,
      this.detail,
      this.grid.el,
    );
    this.arrange();
    if (this.subject) this.ask();
  }

  keep(more = {}) {
    this.page.setQuery({ q: this.filter.value, subject: this.subject, sort: this.grid.sorted, at: this.at, ...more });
  }

  filtered() {
    this.grid.filter = this.filter.value;
    this.grid.arrange();
    this.keep();
  }

  asked(event) {
    event.preventDefault();
    this.subject = this.about.value.trim();
    this.at = "";
    this.detail.hidden = true;
    this.story = null;
    this.keep();
    if (this.subject) this.ask();
    else {
      this.state.replaceChildren();
      this.arrange();
    }
  }

  async ask() {
    const subject = this.subject;
    try {
      const body = await read(`/v1/why/${subject.split("/").map(encodeURIComponent).join("/")}`);
      if (this.closed || subject !== this.subject) return;
      this.story = body.data;
      this.state.replaceChildren(
        ...(body.unanswered?.length
          ? [quiet(`Incomplete: ${body.unanswered.map((each) => each.host).join(", ")} did not answer.`)]
          : []),
      );
    } catch (error) {
      if (this.closed || subject !== this.subject) return;
      this.story = [];
      this.state.replaceChildren(refusal(error));
    }
    this.arrange();
  }

  events() {
    return this.subject ? (this.story ?? []) : this.model.events;
  }

  arrange() {
    const rows = new Map();
    for (const event of [...this.events()].reverse()) {
      let key = eventKey(event);
      while (rows.has(key)) key += "+";
      rows.set(key, event);
    }
    this.grid.set(rows);
    if (this.at && rows.has(this.at) && this.shown !== this.at) {
      this.grid.select(this.at);
      this.show(rows.get(this.at));
    }
  }

  // One event, with a link that leads to it: its subject's events are kept by the rack, this page's are not.
  show(row) {
    this.shown = this.at = eventKey(row);
    const path = `#/events?${new URLSearchParams({ subject: this.subject || subjectWord(row.subject), at: this.at })}`;
    const fact = (term, value) => h("div", {}, h("dt", {}, term), h("dd", {}, value || "not said"));
    this.detail.replaceChildren(
      h("h2", {}, `${subjectWord(row.subject)}: ${row.event}`),
      h(
        "dl",
        { class: "facts wide" },
        fact("Time", clock(row.wall_s)),
        fact("Told by", row.host),
        fact("Why", row.reason),
        fact("Log entry", row.key),
      ),
      h(
        "p",
        {},
        h("a", { href: path }, "Link to this event"),
        subjectPath(row.subject) && h("a", { href: subjectPath(row.subject) }, `Go to ${subjectWord(row.subject)}`),
      ),
    );
    this.detail.hidden = false;
    this.keep({ subject: this.subject });
  }

  update(changed) {
    if (!this.subject && changed.has("happened")) this.arrange();
  }

  move(by) {
    this.grid.move(by);
  }

  enter() {
    this.grid.enter();
  }

  escape() {
    if (!this.detail.hidden) {
      this.detail.hidden = true;
      this.at = this.shown = "";
      this.keep();
      return true;
    }
    if (!this.filter.value) return false;
    this.filter.value = "";
    this.filtered();
    return true;
  }

  close() {
    this.closed = true;
    this.grid.close();
  }
}
