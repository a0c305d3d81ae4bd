// One job: where it is and why, what became of it and when, its curves, what its steps wait for, what its ranks wrote.
import { Refusal, bytes, brief, clock, count, h, percent, plural, read, s, say, seconds } from "../lib/dom.js";
import {
  ahead,
  gpuTime,
  jobClass,
  jobFor,
  jobName,
  jobOwner,
  jobWorkers,
  marks,
  phases,
  place,
  startWords,
  waits,
} from "../lib/facts.js";
import { Chart, spark } from "../lib/charts.js";
import { alarm, bar, chip, command, heading, quiet, refusal, sayChip } from "../lib/widgets.js";

const LOG_TAIL = 32768; // bytes of a rank's output that are shown
const WIDE = 800;
const ANEW_S = 3;

export class JobView {
  constructor(page, id) {
    this.page = page;
    this.model = page.model;
    this.id = id;
    this.charts = new Map();
    this.rank = 0;
    this.state = h("span", { class: "chip" });
    this.state.hidden = true;
    this.said = h("p", { class: "reason" });
    this.facts = h("dl", { class: "facts" });
    this.timeline = h("div", { class: "timeline" }, quiet("Asking the rack ..."));
    this.waits = h("div");
    this.curves = h("div", { class: "charts" });
    this.ranks = h("div");
    this.logHead = h("div", { class: "subheading" });
    this.log = h("pre", { class: "log", tabindex: "0", "aria-label": "Output of the rank" });
    this.logState = h("div");
    this.story = h("div");
    this.acts = h("div", { class: "acts" });
    this.variables = h("div");
    this.env = h(
      "details",
      { ontoggle: () => this.readEnv() },
      h("summary", {}, "Variables it was submitted with, for its owner and operators"),
      this.variables,
    );
    const panel = (title, ...parts) =>
      h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), ...parts);
    this.el = h(
      "section",
      { class: "view" },
      heading(
        `Job ${id}`,
        this.state,
        h(
          "a",
          { class: "quiet-link", href: `/v1/jobs/${encodeURIComponent(id)}`, target: "_blank", rel: "noopener" },
          "JSON",
        ),
      ),
      this.said,
      this.facts,
      panel("Timeline", this.timeline),
      panel("What each step waits for", this.waits),
      panel("Curves", this.curves),
      panel("Ranks and GPUs", this.ranks),
      panel("Output", this.logHead, this.logState, this.log),
      panel("Environment", this.env, command(`agentctl job ${id} --env`)),
      panel("Events", this.story),
      panel(
        "Change it",
        h(
          "p",
          { class: "more" },
          "Nothing can be changed from a browser, which may send what its visitor does not know of. In a terminal, each asks first who you are:",
        ),
        this.acts,
      ),
    );
    this.log.hidden = true;
    this.drawRow();
    this.refresh();
  }

  get row() {
    return this.model.rows("jobs").get(this.id) ?? this.job;
  }

  // Ask for what the stream does not carry; again after a while as long as the job goes on.
  async refresh() {
    clearTimeout(this.asking);
    const id = encodeURIComponent(this.id);
    const [job, story, curve, starts] = await Promise.allSettled([
      read(`/v1/jobs/${id}`),
      read(`/v1/why/${id}`),
      read(`/v1/jobs/${id}/curve`),
      this.row?.state === "queued" ? read(`/v1/starts?job=${id}`) : null,
    ]);
    if (this.closed) return;
    if (job.value) this.job = { ...job.value.data, as_of: job.value.as_of_wall_s };
    this.start = starts.value?.data.starts.find((each) => each.id === this.id);
    if (!this.row) {
      const error = job.reason ?? new Error("it is not known");
      this.el.replaceChildren(
        heading(`Job ${this.id}`),
        refusal(error),
        h("p", {}, "What became of jobs that ended long ago: ", command(`agentctl report ${this.id}`)),
      );
      return;
    }
    this.drawRow();
    this.drawStory(story);
    await this.drawCurves(curve);
    await this.readLog();
    if (!this.closed && !document.hidden)
      this.asking = setTimeout(() => this.refresh(), this.row.over ? 30000 : ANEW_S * 1000);
    else if (!this.closed) this.asking = setTimeout(() => this.refresh(), 15000);
  }

  drawRow() {
    const job = this.row;
    if (!job) return;
    this.state.hidden = false;
    sayChip(this.state, job.state);
    const starts = startWords(this.start);
    say(this.said, [job.reason, starts].filter(Boolean).join("; "));
    this.said.hidden = !this.said.textContent;
    const fact = (term, value, more) =>
      h("div", {}, h("dt", {}, term), h("dd", {}, value || "not said", more && h("span", { class: "more" }, more)));
    const { tally, losses, seen } = job;
    const word = job.over ? "Took" : job.state === "queued" ? "Waits for" : "Runs for";
    const ends = [job.ended_as, job.exit_code != null && `exit code ${job.exit_code}`].filter(Boolean).join(", ");
    const shown = [
      fact("Name", jobName(job) || "not shown to you", jobOwner(job)),
      fact("Tenant", job.tenant, jobClass(job)),
      fact("GPUs", count(job.gpus), `${jobWorkers(job)} workers`),
      fact(word, seconds(jobFor(job, this.model.now_s())), `submitted ${clock(job.times.submitted_wall_s)}`),
      fact("Attained", gpuTime(job.attained_gpu_s), `queue ${job.queue}`),
    ];
    if (place(job) != null)
      shown.push(
        fact("Place in the queue", String(place(job)), ahead(job) ? `ahead: ${ahead(job)}` : "nobody is ahead"),
      );
    if (job.over) shown.push(fact("Ended", clock(job.times.ended_wall_s), ends));
    shown.push(
      fact(
        "Starts so far",
        count(tally.attempt),
        [
          tally.preemptions && plural(tally.preemptions, "preemption"),
          tally.hosts_lost && `${plural(tally.hosts_lost, "host")} lost`,
          tally.failures && plural(tally.failures, "failure"),
        ]
          .filter(Boolean)
          .join(", ") || "not preempted",
      ),
    );
    if (job.step != null)
      shown.push(
        fact(
          "Step",
          count(job.step),
          Object.entries(job.metrics ?? {})
            .slice(0, 3)
            .map(([name, value]) => `${name} ${brief(value)}`)
            .join(", "),
        ),
      );
    shown.push(
      fact(
        "On a lost host",
        losses.on_lost,
        losses.heals_not || (Object.keys(losses.away).length ? `away now: ${Object.keys(losses.away).join(", ")}` : ""),
      ),
    );
    if (seen.saved) shown.push(fact("Saved", `step ${seen.saved.step ?? "not said"}`, "newest checkpoint known"));
    if (job.elastic)
      shown.push(fact("Processes", count(job.elastic.processes), `of at most ${job.elastic.workers_max}`));
    this.facts.replaceChildren(...shown);
    this.drawWaits(job);
    this.drawRanks(job);
    this.drawActs(job);
  }

  drawWaits(job) {
    const timing = job.seen?.timing;
    if (!timing)
      return this.waits.replaceChildren(
        quiet(
          job.over
            ? "It has ended: what its hosts saw of its steps is no longer kept."
            : "Not known: too few steps were reported. A script reports them by job.step(loss=...), and hooks see those of PyTorch and JAX.",
        ),
      );
    const parts = waits(job),
      rest = Math.max(0, 1 - parts.reduce((sum, [, share]) => sum + share, 0));
    const widths = [
      ...parts.map(([what, share], at) => ({ words: `waits for ${what}`, share, kind: `wait${at % 4}` })),
      { words: "computes, or is not known", share: rest, kind: "compute" },
    ];
    const stack = h(
      "div",
      {
        class: "stack",
        role: "img",
        "aria-label": widths.map((each) => `${percent(each.share)} ${each.words}`).join(", "),
      },
      widths.map((each) => {
        const part = h("span", { class: each.kind });
        part.style.width = `${each.share * 100}%`;
        return part;
      }),
    );
    const lead = parts.length
      ? `${percent(parts[0][1])} of each step waits for ${parts[0][0]}.`
      : "No step waits for more than 1 % of its time.";
    this.waits.replaceChildren(
      h(
        "p",
        { class: "lead" },
        lead,
        h("span", { class: "more" }, ` A step takes ${seconds(timing.step_s)} on the slowest host.`),
      ),
      stack,
      h(
        "ul",
        { class: "key" },
        widths.map((each) =>
          h(
            "li",
            {},
            h("span", { class: `swatch ${each.kind}`, "aria-hidden": "true" }),
            `${percent(each.share)} ${each.words}`,
          ),
        ),
      ),
    );
  }

  drawRanks(job) {
    if (!job.places.length) return this.ranks.replaceChildren(quiet("It has no GPU now."));
    const gpus = new Map([...this.model.rows("gpus")].map(([key, row]) => [row.uuid, [key, row]]));
    const named = new Map((this.job?.ranks ?? []).map((rank) => [rank.rank, rank]));
    const lines = job.places.flatMap((at) =>
      (at.devices ?? at.gpus).map((uuid, index) => {
        const [key, gpu] = job.over ? [] : (gpus.get(uuid) ?? gpus.get(at.gpus[index]) ?? []);
        const uses = key ? (this.model.uses.get(key) ?? []).map(([, share]) => share) : [];
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, h("a", { href: `#/host/${encodeURIComponent(at.host)}` }, at.host)),
          h("td", {}, gpu ? `GPU ${gpu.index}` : uuid),
          h("td", {}, gpu ? bar(gpu.utilization) : "", gpu ? ` ${percent(gpu.utilization)}` : "not known"),
          h("td", {}, uses.length > 1 ? spark(uses) : ""),
          h(
            "td",
            { class: "number" },
            gpu ? `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}` : "not known",
          ),
        );
      }),
    );
    const shown = lines.slice(0, 64);
    const ranks = [...named.values()]
      .filter((rank) => rank.state !== "running")
      .slice(0, 8)
      .map(
        (rank) => `rank ${rank.rank} on ${rank.host}: ${rank.state}${rank.code != null ? `, exit ${rank.code}` : ""}`,
      );
    this.ranks.replaceChildren(
      h(
        "p",
        { class: "more" },
        job.places
          .map((at) => `${at.host}: ranks ${at.ranks.join(" ")}`)
          .slice(0, 16)
          .join("; "),
      ),
      ranks.length ? h("p", {}, ranks.join("; ")) : "",
      lines.length
        ? h(
            "div",
            { class: "scrolls", tabindex: "0", role: "group", "aria-label": "GPUs of the job" },
            h(
              "table",
              {},
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  ["Host", "GPU", "Busy", "Since this page is open", "Memory used"].map((title, at) =>
                    h("th", { scope: "col", class: at === 4 ? "number" : "" }, title),
                  ),
                ),
              ),
              h("tbody", {}, shown),
            ),
          )
        : "",
      lines.length > shown.length
        ? h("p", { class: "more" }, `The first ${shown.length} of ${plural(lines.length, "GPU")}.`)
        : "",
    );
  }

  drawActs(job) {
    const wanted = job.over ? [] : job.state === "queued" ? ["hold", "cancel"] : ["checkpoint", "requeue", "cancel"];
    const now = wanted.join();
    if (now === this.acted) return;
    this.acted = now;
    this.acts.replaceChildren(
      ...(wanted.length
        ? wanted.map((verb) => command(`agentctl ${verb} ${this.id}`))
        : [command(`agentctl report ${this.id}`)]),
    );
  }

  drawStory(story) {
    if (story.reason) {
      this.timeline.replaceChildren(refusal(story.reason));
      this.story.replaceChildren(refusal(story.reason));
      return;
    }
    const events = story.value.data.filter((event) => !event.subject.startsWith("gpu/"));
    const now = events.length + String(events.at(-1)?.wall_s);
    if (this.row.over && this.told === now) return;
    this.told = now;
    this.drawTimeline(events);
    const shown = events.slice(-40).reverse();
    this.story.replaceChildren(
      h(
        "ol",
        { class: "story" },
        shown.map((event) =>
          h(
            "li",
            {},
            h("time", {}, clock(event.wall_s)),
            h("span", { class: "event" }, event.event),
            h("span", { class: "more" }, [event.host, event.reason].filter(Boolean).join(": ")),
          ),
        ),
      ),
      h(
        "p",
        {},
        h("a", { href: `#/events?subject=${encodeURIComponent(this.id)}` }, `All ${plural(events.length, "event")}`),
      ),
    );
  }

  drawTimeline(events) {
    const found = phases(events),
      flags = marks(events);
    if (!found.length) return this.timeline.replaceChildren(quiet("No event says when it waited or ran."));
    const from = found[0].from_s,
      to = found.at(-1).to_s ?? this.model.now_s(),
      span = Math.max(0.001, to - from);
    const x = (at) => (WIDE * (at - from)) / span;
    const words = found.map((each) => `${each.state} ${seconds((each.to_s ?? to) - each.from_s)}`).join(", then ");
    const svg = s(
      "svg",
      {
        viewBox: `0 0 ${WIDE} 46`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${words}${flags.length ? `; ${flags.map((flag) => `${flag.words} at ${clock(flag.wall_s)}`).join(", ")}` : ""}`,
      },
      found.map((each) =>
        s(
          "rect",
          {
            class: `phase ${each.state}`,
            x: x(each.from_s),
            y: 4,
            height: 24,
            width: Math.max(2, x(each.to_s ?? to) - x(each.from_s)),
          },
          s("title", {}, `${each.state} for ${seconds((each.to_s ?? to) - each.from_s)}, from ${clock(each.from_s)}`),
        ),
      ),
      flags.map((flag) =>
        s(
          "path",
          { class: "flag", d: `M${x(flag.wall_s)} 2 v36 l-5 7 h10 l-5 -7` },
          s("title", {}, `${flag.words}, ${clock(flag.wall_s)}`),
        ),
      ),
    );
    const sums = new Map();
    for (const each of found) sums.set(each.state, (sums.get(each.state) ?? 0) + (each.to_s ?? to) - each.from_s);
    this.timeline.replaceChildren(
      svg,
      h("p", { class: "ends" }, h("time", {}, clock(from)), h("time", {}, found.at(-1).to_s ? clock(to) : "now")),
      h(
        "ul",
        { class: "key" },
        [...sums].map(([state, sum]) =>
          h("li", {}, h("span", { class: `swatch phase ${state}`, "aria-hidden": "true" }), `${state} ${seconds(sum)}`),
        ),
        flags
          .slice(-6)
          .map((flag) =>
            h(
              "li",
              {},
              h("span", { class: "swatch flag", "aria-hidden": "true" }, "▲"),
              `${flag.words} ${clock(flag.wall_s)}`,
            ),
          ),
      ),
    );
  }

  async drawCurves(curve) {
    if (curve.reason) {
      const said = refusal(curve.reason);
      this.curves.replaceChildren(
        curve.reason instanceof Refusal ? h("div", {}, said, command(`agentctl job ${this.id}`)) : said,
      );
      return;
    }
    const { points, unanswered } = curve.value.data;
    const names = [...new Set(points.flatMap((point) => Object.keys(point.metrics)))]
      .filter((name) => name !== "device_wait_s")
      .sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
    const wanted = [
      ...names.slice(0, 6).map((name) => [name, (point) => point.metrics[name], brief]),
      ["step time", (point) => point.step_s, seconds],
    ];
    const drawn = [];
    for (const [name, value, format] of wanted) {
      const found = points.map((point) => [point.step, value(point)]).filter(([, each]) => each != null);
      if (!found.length) continue;
      let chart = this.charts.get(name);
      if (!chart) this.charts.set(name, (chart = new Chart(name, { format })));
      drawn.push([chart, found]);
    }
    const parts = drawn.map(([chart]) => chart.el);
    if (unanswered.length) parts.push(alarm(`${unanswered.join(", ")} did not answer, so steps may be missing`));
    if (!points.length)
      parts.push(
        quiet(
          "No step of this job is known: none was reported, or its curves are no longer kept. A script reports them by job.step(loss=...).",
        ),
      );
    if (parts.length !== this.curves.children.length || parts.some((part, at) => part !== this.curves.children[at]))
      this.curves.replaceChildren(...parts);
    for (const [chart, found] of drawn) await chart.set(found);
  }

  async readLog() {
    const job = this.row,
      id = encodeURIComponent(this.id);
    const ranks = [...new Set(job.places.flatMap((at) => at.ranks))].sort((a, b) => a - b);
    if (!this.chosen && ranks.length) {
      this.chosen = h(
        "select",
        { onchange: () => this.pickRank(Number(this.chosen.value)) },
        ranks.slice(0, 256).map((rank) => h("option", { value: rank }, `rank ${rank}`)),
      );
      this.logHead.replaceChildren(h("label", {}, "Output of ", this.chosen), command(`agentctl logs -f ${this.id}`));
    }
    if (!ranks.length && !this.chosen) return this.logState.replaceChildren(quiet("It has no rank yet."));
    if (this.refusedLog) return;
    const rank = this.rank;
    try {
      let offset = this.logEnd ?? 0,
        part = (await read(`/v1/jobs/${id}/logs?rank=${rank}&offset=${offset}`)).data;
      if (this.logEnd === undefined && part.size > LOG_TAIL) {
        offset = part.size - LOG_TAIL;
        part = (await read(`/v1/jobs/${id}/logs?rank=${rank}&offset=${offset}`)).data;
      }
      for (let parts = 0; parts < 8 && !this.closed && rank === this.rank; parts++) {
        const data = Uint8Array.from(atob(part.data), (each) => each.charCodeAt(0));
        this.logEnd = part.offset + data.length;
        this.append(new TextDecoder().decode(data));
        if (!data.length || this.logEnd >= part.size) break;
        part = (await read(`/v1/jobs/${id}/logs?rank=${rank}&offset=${this.logEnd}`)).data;
      }
      say(
        this.logState,
        part.size
          ? `on ${part.host}, ${bytes(part.size)} in all${part.end ? ", ended" : ""}`
          : `nothing was written yet on ${part.host}`,
      );
      this.log.hidden = !this.log.textContent;
    } catch (error) {
      this.refusedLog = error instanceof Refusal && error.said.code === 4;
      this.logState.replaceChildren(refusal(error));
    }
  }

  // The job's environment, asked for once somebody wants to see it; values that look like secrets never come.
  async readEnv() {
    if (!this.env.open || this.envKnown) return;
    try {
      const { data } = await read(`/v1/jobs/${encodeURIComponent(this.id)}/env`);
      const lines = Object.entries(data.variables).map(([name, value]) => `${name}=${value}`);
      this.envKnown = true;
      this.variables.replaceChildren(
        lines.length
          ? h("pre", { class: "log", tabindex: "0", "aria-label": "Environment of the job" }, lines.join("\n"))
          : quiet("It was submitted without any."),
      );
    } catch (error) {
      this.variables.replaceChildren(refusal(error));
    }
  }

  append(text) {
    const below = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
    const all = this.log.textContent + text;
    this.log.textContent = all.length > 2 * LOG_TAIL ? all.slice(-LOG_TAIL) : all;
    this.log.hidden = false;
    if (below) this.log.scrollTop = this.log.scrollHeight;
  }

  pickRank(rank) {
    this.rank = rank;
    this.logEnd = undefined;
    this.refusedLog = false;
    this.log.textContent = "";
    this.readLog();
  }

  update(changed) {
    if (!changed.has("jobs") && !changed.has("gpus")) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const state = this.row?.state;
      this.drawRow();
      if (state !== this.before && this.before !== undefined) this.refresh();
      this.before = state;
    }, 100);
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
