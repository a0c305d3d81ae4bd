// One host: its state and what is wrong with it, its GPUs with curves, its jobs, its memory, how it is reached.
import { bytes, clock, count, h, percent, plural, read, say, seconds } from "../lib/dom.js";
import { GPU_STATES, gpuJobs, gpuNote, gpuState, hostNote, jobName, jobOwner } from "../lib/facts.js";
import { Chart } from "../lib/charts.js";
import { alarm, bar, chip, command, heading, quiet, refusal, sayChip } from "../lib/widgets.js";

export class HostView {
  constructor(page, host) {
    this.page = page;
    this.model = page.model;
    this.host = host;
    this.charts = new Map();
    this.state = h("span", { class: "chip" });
    this.alarms = h("div");
    this.facts = h("dl", { class: "facts" });
    this.gpus = h("div");
    this.curves = h("div", { class: "charts" });
    this.jobs = h("div");
    this.hears = h("div");
    this.story = h("div");
    this.acts = h("div", { class: "acts" });
    const panel = (title, ...parts) =>
      h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), ...parts);
    this.el = h(
      "section",
      { class: "view" },
      heading(`Host ${host}`, this.state),
      this.alarms,
      this.facts,
      panel("GPUs", this.gpus),
      panel("Use since this page is open", this.curves),
      panel("Jobs here", this.jobs),
      panel("Gossip", this.hears),
      panel("Events", this.story),
      panel(
        "Change it",
        h("p", { class: "more" }, "Nothing can be changed from a browser. An operator types:"),
        this.acts,
      ),
    );
    this.draw();
    this.ask();
  }

  async ask() {
    try {
      const { data } = await read(`/v1/why/${encodeURIComponent(this.host)}`);
      if (this.closed) return;
      this.story.replaceChildren(
        h(
          "ol",
          { class: "story" },
          data
            .slice(-30)
            .reverse()
            .map((event) =>
              h(
                "li",
                {},
                h("time", {}, clock(event.wall_s)),
                h("span", { class: "event" }, event.event),
                h(
                  "span",
                  { class: "more" },
                  [event.host !== this.host && event.host, event.reason].filter(Boolean).join(": "),
                ),
              ),
            ),
        ),
        h(
          "p",
          {},
          h("a", { href: `#/events?subject=${encodeURIComponent(this.host)}` }, `All ${plural(data.length, "event")}`),
        ),
      );
    } catch (error) {
      if (!this.closed)
        this.story.replaceChildren(error.said?.code === 3 ? quiet("No event of this host is known.") : refusal(error));
    }
    if (!this.closed) this.asking = setTimeout(() => this.ask(), 5000);
  }

  draw() {
    const host = this.model.rows("hosts").get(this.host);
    if (!host) {
      sayChip(this.state, this.model.tables.hosts.known ? "not known" : "...");
      const known = this.model.tables.hosts.known;
      const why = known ? "No host of that name is known. It may have left the rack." : "Asking the agent ...";
      this.alarms.replaceChildren(quiet(why));
      this.said = null;
      return;
    }
    sayChip(this.state, host.state);
    const note = hostNote({ ...host, troubles: [] });
    const said = JSON.stringify([host.troubles, note]);
    if (said !== this.said) {
      this.said = said;
      this.alarms.replaceChildren(
        ...(host.troubles ?? []).map((each) => alarm(each.what, each.next)),
        ...(note ? [alarm(note)] : []),
      );
    }
    const gpus = this.model.by.gpus.get(this.host) ?? [],
      jobs = this.model.by.jobs.get(this.host) ?? [];
    const fact = (term, value, more) =>
      h("div", {}, h("dt", {}, term), h("dd", {}, value, more && h("span", { class: "more" }, more)));
    const since = host.since_s + Math.max(0, this.model.now_s() - host.as_of);
    const slab = [...this.model.rows("slabs").values()][0]?.size_bytes;
    const size = (slabs) => (slabs == null ? "not known" : slab ? bytes(slabs * slab) : plural(slabs, "slab"));
    this.facts.replaceChildren(
      fact("State", host.state, `for ${seconds(since)}`),
      fact(
        "Part",
        host.leads ? "leader" : (this.model.rows("voters").get(this.host)?.part ?? "follows the log"),
        host.address,
      ),
      fact(
        "GPUs free",
        host.gpus_total == null ? "not known" : `${host.gpus_free ?? "?"} of ${host.gpus_total}`,
        host.gpus_out ? `${host.gpus_out} out of use` : "none out of use",
      ),
      fact(
        "Memory lent",
        size(host.slabs_lent),
        `spare ${size(host.slabs_free)}, borrows ${bytes(this.model.by.borrowed.get(this.host) ?? 0)}`,
      ),
      fact("Version", host.version || "not said", host.other_users ? `jobs of other users: ${host.other_users}` : ""),
    );
    this.drawGpus(gpus);
    this.jobs.replaceChildren(
      jobs.length
        ? table(
            ["Job", "Name", "Owner", "State", "GPUs", "Ranks here"],
            jobs.map((job) => [
              h("a", { href: `#/job/${job.id}` }, job.id),
              jobName(job) || "–",
              jobOwner(job),
              chip(job.state),
              count(job.gpus),
              job.places
                .filter((at) => at.host === this.host)
                .flatMap((at) => at.ranks)
                .join(" "),
            ]),
          )
        : quiet("No job runs on this host."),
    );
    this.drawGossip();
    const shut = host.drained_by || host.cordoned_by;
    const wanted = shut ? [host.drained_by ? "resume" : "uncordon"] : ["cordon", "drain"];
    if (this.acted !== wanted.join()) {
      this.acted = wanted.join();
      this.acts.replaceChildren(...wanted.map((verb) => command(`agentctl hosts ${verb} ${this.host}`)));
    }
  }

  drawGpus(gpus) {
    if (!gpus.length) {
      this.gpus.replaceChildren(quiet("No GPU of this host is known now."));
      this.curves.replaceChildren(quiet("Nothing to draw."));
      return;
    }
    this.gpus.replaceChildren(
      table(
        ["GPU", "State", "Busy", "Memory used", "Job", "Model", "Note"],
        gpus.map((gpu) => {
          const state = gpuState(gpu);
          return [
            String(gpu.index),
            h(
              "span",
              {},
              h("span", { class: `tile ${state}`, "aria-hidden": "true" }, GPU_STATES[state].letter),
              ` ${GPU_STATES[state].words}`,
            ),
            h("span", { class: "meter" }, bar(gpu.utilization), percent(gpu.utilization)),
            `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`,
            h(
              "span",
              {},
              gpuJobs(gpu).flatMap((job, at) => [at ? " " : "", h("a", { href: `#/job/${job}` }, job)]),
            ),
            gpu.model || "not known",
            gpuNote(gpu),
          ];
        }),
      ),
    );
    const parts = [];
    for (const gpu of gpus) {
      const key = `${gpu.host}/${gpu.index}`,
        samples = this.model.uses.get(key) ?? [];
      if (samples.length < 2 || !samples.some(([, share]) => share)) continue;
      let chart = this.charts.get(key);
      if (!chart)
        this.charts.set(
          key,
          (chart = new Chart(`GPU ${gpu.index}, busy`, {
            format: percent,
            time: true,
            height: 120,
            least: 0,
            most: 1,
          })),
        );
      parts.push(chart.el);
      if (chart.last !== samples.at(-1))
        chart.set([...samples, [this.model.now_s(), samples.at(-1)[1]]].map(([at, share]) => [at, share]));
      chart.last = samples.at(-1);
    }
    if (!parts.length) parts.push(quiet("No GPU of this host has changed its use since this page was opened."));
    if (
      parts.length !== this.curves.children.length ||
      parts.some(
        (part, at) => part.isConnected === false || (part.tagName === "FIGURE" && part !== this.curves.children[at]),
      )
    )
      this.curves.replaceChildren(...parts);
  }

  drawGossip() {
    const row = this.model.rows("gossip").get(this.host);
    if (!row) return say(this.hears, "What it sends and hears is not known now.");
    const suspects = row.suspects?.length
      ? `it suspects ${row.suspects.map((each) => each.host).join(", ")}`
      : "it suspects nobody";
    say(
      this.hears,
      `${row.alone ? "It hears nobody" : row.health ? `It finds itself slow (${row.health})` : "It finds itself well"}; ${count(row.probes_failed)} of its ${count(row.probes)} probes had no answer; ${suspects}; ${bytes(row.sent_bytes)} sent, ${bytes(row.received_bytes)} received.`,
    );
  }

  update(changed) {
    if (!["hosts", "gpus", "jobs", "gossip", "voters", "slabs"].some((name) => changed.has(name))) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.draw(), 150);
  }

  move(by) {
    this.page.main.scrollBy({ top: by * 80 });
  }

  close() {
    this.closed = true;
    clearTimeout(this.asking);
    clearTimeout(this.timer);
    for (const chart of this.charts.values()) chart.close();
  }
}

function table(titles, rows) {
  return h(
    "div",
    { class: "scrolls", tabindex: "0", role: "group", "aria-label": titles.join(", ") },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title) => h("th", { scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((cells) =>
          h(
            "tr",
            {},
            cells.map((cell, at) => h(at ? "td" : "th", at ? {} : { scope: "row" }, cell)),
          ),
        ),
      ),
    ),
  );
}
