// The views that are one list: hosts, GPUs, jobs, tenants, tensors. Each is a title, a filter, and a grid of rows.
import { bytes, count, h, percent, plural, read, say, seconds } from "../lib/dom.js";
import {
  GPU_STATES,
  ahead,
  gpuTime,
  gpuJobs,
  gpuNote,
  gpuState,
  hostNote,
  hostTiles,
  jobClass,
  jobFor,
  jobName,
  jobOwner,
  jobWorkers,
  place,
  startBrief,
  tally,
  tallyWords,
  waitBrief,
  waitWords,
} from "../lib/facts.js";
import { Grid, alarm, gaps, heading } from "../lib/widgets.js";

const SOON_MS = 250; // long lists are arranged anew no more often

// A list that has a grid. `shown(model)`: its rows by key; `tables`: what it goes by.
export class ListView {
  constructor(
    page,
    { title, table, tables = [table], path, columns, open, empty, shown, sorted = "", label, note, asks },
  ) {
    Object.assign(this, { page, title, table, tables, shown, asks });
    const query = page.query;
    this.filter = h("input", {
      type: "search",
      class: "filter",
      placeholder: "Filter: word, -word, field:word",
      "aria-label": `Filter ${title}`,
      value: query.get("q") ?? "",
      oninput: () => this.filtered(),
      autocomplete: "off",
      spellcheck: "false",
    });
    this.counted = h("span", { class: "counted" });
    this.gaps = h("p", { class: "alarm", role: "status", hidden: true });
    const json = path && h("a", { class: "quiet-link", href: path, target: "_blank", rel: "noopener" }, "JSON");
    this.grid = new Grid({
      label: label ?? title,
      columns,
      scroller: page.main,
      open,
      empty: () => this.emptiness(empty),
      sorted: query.get("sort") ?? sorted,
      filter: query.get("q") ?? "",
    });
    this.default = sorted;
    this.grid.oncount = (seen, all) => say(this.counted, seen === all ? count(all) : `${count(seen)} of ${count(all)}`);
    this.grid.onsort = (by) => page.setQuery({ q: this.filter.value, sort: by === sorted ? "" : by });
    this.note = note ? h("div", { class: "note" }) : null;
    this.told = note;
    this.el = h(
      "section",
      { class: "view list-view" },
      heading(title, this.counted, this.filter, json),
      this.gaps,
      this.note,
      this.grid.el,
    );
    this.arrange();
    this.ask();
  }

  emptiness(words) {
    return this.page.model.tables[this.table].known ? words : "Asking the agent ...";
  }

  // What no table has, asked for while this view is open.
  async ask() {
    if (!this.asks) return;
    try {
      await this.asks(this);
    } catch {
      // it is an addition: what the stream says stays
    }
    if (!this.closed) this.asking = setTimeout(() => this.ask(), 5000);
  }

  filtered() {
    this.grid.filter = this.filter.value;
    this.grid.arrange();
    this.page.setQuery({ q: this.filter.value, sort: this.grid.sorted === this.default ? "" : this.grid.sorted });
  }

  arrange() {
    this.arranged = performance.now();
    this.grid.set(this.shown(this.page.model, this));
    const table = this.page.model.tables[this.table];
    gaps(this.gaps, table.unanswered);
    if (this.told) this.note.replaceChildren(...[this.told(this.page.model, this)].flat().filter(Boolean));
  }

  update(changed) {
    if (!this.tables.some((name) => changed.has(name))) return;
    clearTimeout(this.timer);
    const small = this.grid.rows.size < 300;
    const wait = small ? 0 : SOON_MS - (performance.now() - this.arranged);
    if (wait <= 0) this.arrange();
    else {
      this.grid.rows = this.shown(this.page.model, this);
      this.grid.virtual.refresh(); // rows that are seen change at once
      this.timer = setTimeout(() => this.arrange(), wait);
    }
  }

  tick() {
    if (this.grid.columns.some((column) => column.ticks)) this.grid.virtual.refresh();
  }

  move(by) {
    this.grid.move(by);
  }

  enter() {
    this.grid.enter();
  }

  // Esc: leave the filter first. Whether there was something to leave.
  escape() {
    if (!this.filter.value) return false;
    this.filter.value = "";
    this.filtered();
    return true;
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.asking);
    this.grid.close();
  }
}

const hostLink = (host) => `#/host/${encodeURIComponent(host)}`;
const jobLink = (job) => `#/job/${encodeURIComponent(job)}`;

function gpuMix(model, host) {
  if (host.gpus_total == null) return "not known";
  return tallyWords(tally(hostTiles(host, model.by.gpus.get(host.host)))) || "none";
}

function hostMemory(model, host) {
  const gpus = model.by.gpus.get(host.host);
  if (!gpus?.length) return null;
  const total = gpus.reduce((sum, gpu) => sum + gpu.memory_total_bytes, 0);
  return total ? gpus.reduce((sum, gpu) => sum + gpu.memory_used_bytes, 0) / total : null;
}

export function hostsView(page) {
  const { model } = page;
  return new ListView(page, {
    title: "Hosts",
    table: "hosts",
    tables: ["hosts", "gpus", "jobs"],
    path: "/v1/hosts",
    open: (row) => hostLink(row.host),
    empty: "No host is known. An agent that joins the rack appears here by itself.",
    shown: (from) => from.rows("hosts"),
    columns: [
      { id: "host", title: "Host", width: 130, rank: 0, text: (r) => r.host, link: (r) => hostLink(r.host) },
      { id: "state", title: "State", width: 96, rank: 1, text: (r) => r.state, chip: true },
      { id: "role", title: "Role", width: 86, rank: 5, text: (r) => (r.leads ? "leader" : "") },
      { id: "gpus", title: "GPUs", width: 210, rank: 4, text: (r) => gpuMix(model, r), sort: (r) => r.gpus_total },
      {
        id: "free",
        title: "Free",
        width: 64,
        rank: 2,
        number: true,
        text: (r) => (r.gpus_known ? (r.gpus_free ?? "?") : "?"),
        sort: (r) => r.gpus_free,
      },
      {
        id: "memory",
        title: "GPU memory",
        width: 140,
        rank: 6,
        text: (r) => percent(hostMemory(model, r)),
        sort: (r) => hostMemory(model, r),
        bar: (r) => hostMemory(model, r),
      },
      {
        id: "jobs",
        title: "Jobs",
        width: 64,
        rank: 7,
        number: true,
        text: (r) => model.by.jobs.get(r.host)?.length ?? 0,
        sort: (r) => model.by.jobs.get(r.host)?.length ?? 0,
      },
      {
        id: "lent",
        title: "Slabs lent",
        width: 92,
        rank: 8,
        number: true,
        text: (r) => r.slabs_lent ?? "?",
        sort: (r) => r.slabs_lent,
      },
      { id: "version", title: "Version", width: 86, rank: 9, text: (r) => r.version || "?" },
      { id: "note", title: "Note", width: 150, rank: 3, grow: true, text: hostNote },
    ],
  });
}

export function gpusView(page) {
  return new ListView(page, {
    title: "GPUs",
    table: "gpus",
    path: "/v1/gpus",
    open: (row) => hostLink(row.host),
    empty: "No GPU is known. Hosts without GPUs lend memory and vote all the same.",
    shown: (from) => from.rows("gpus"),
    columns: [
      {
        id: "gpu",
        title: "GPU",
        width: 120,
        rank: 0,
        text: (r) => `${r.host} ${r.index}`,
        link: (r) => hostLink(r.host),
      },
      {
        id: "state",
        title: "State",
        width: 120,
        rank: 1,
        text: (r) => GPU_STATES[gpuState(r)].words,
        chip: false,
        tone: (r) => gpuState(r),
      },
      {
        id: "busy",
        title: "Busy",
        width: 140,
        rank: 2,
        text: (r) => percent(r.utilization),
        sort: (r) => r.utilization,
        bar: (r) => r.utilization,
      },
      {
        id: "memory",
        title: "Memory used",
        width: 170,
        rank: 4,
        text: (r) => `${bytes(r.memory_used_bytes)} of ${bytes(r.memory_total_bytes)}`,
        sort: (r) => r.memory_used_bytes,
      },
      {
        id: "job",
        title: "Job",
        width: 110,
        rank: 3,
        text: (r) => gpuJobs(r).join(" "),
        link: (r) => (gpuJobs(r)[0] ? jobLink(gpuJobs(r)[0]) : ""),
      },
      {
        id: "model",
        title: "Model",
        width: 160,
        rank: 5,
        text: (r) => `${r.model || "not known"}${r.simulated && !/simulated/i.test(r.model) ? " (simulated)" : ""}`,
      },
      { id: "note", title: "Note", width: 140, rank: 6, grow: true, text: gpuNote },
    ],
  });
}

const ORDER = { running: 0, stopping: 1, placing: 2, queued: 3 };

function queueOrder(model, view) {
  const all = view?.page.query.get("all") === "1";
  const rows = [...model.rows("jobs")].filter(([, job]) => all || !job.over);
  const guests = (job) => (job.state === "queued" && (job.runs_as || job.job_class) === "opportunistic" ? 0.5 : 0);
  const at = new Map(rows.map(([key, job]) => [key, [(ORDER[job.state] ?? 4) + guests(job), place(job) ?? 1e9]]));
  return new Map(rows.sort(([a], [b]) => at.get(a)[0] - at.get(b)[0] || at.get(a)[1] - at.get(b)[1]));
}

export function jobsView(page) {
  const starts = new Map();
  const now = () => page.model.now_s();
  const start = (r) => (r.state === "queued" ? startBrief(starts.get(r.id)) : "");
  const all = page.query.get("all") === "1";
  const view = new ListView(page, {
    title: "Jobs and queue",
    table: "jobs",
    path: `/v1/jobs${all ? "?all=1" : ""}`,
    open: (row) => jobLink(row.id),
    empty: "No job waits or runs. Submit one: agentctl submit --workers 2 -- python train.py",
    shown: queueOrder,
    asks: async (self) => {
      if (![...page.model.rows("jobs").values()].some((job) => job.state === "queued")) return;
      const { data } = await read("/v1/starts");
      starts.clear();
      for (const each of data.starts) starts.set(each.id, each);
      self.grid.virtual.refresh();
    },
    columns: [
      { id: "place", title: "Place", width: 62, rank: 5, number: true, text: (r) => place(r) ?? "", sort: place },
      { id: "job", title: "Job", width: 66, rank: 0, text: (r) => r.id, link: (r) => jobLink(r.id) },
      { id: "name", title: "Name", width: 112, rank: 3, stretch: true, text: (r) => jobName(r), blank: "–" },
      { id: "state", title: "State", width: 100, rank: 1, text: (r) => r.state, chip: true },
      { id: "owner", title: "Owner", width: 96, rank: 6, text: jobOwner },
      { id: "tenant", title: "Tenant", width: 96, rank: 7, text: (r) => r.tenant },
      { id: "class", title: "Class", width: 120, rank: 12, text: jobClass },
      { id: "gpus", title: "GPUs", width: 64, rank: 2, number: true, text: (r) => count(r.gpus), sort: (r) => r.gpus },
      { id: "workers", title: "Workers", width: 104, rank: 13, number: true, text: jobWorkers, sort: (r) => r.workers },
      {
        id: "for",
        title: "For",
        width: 76,
        rank: 4,
        number: true,
        ticks: true,
        text: (r) => seconds(jobFor(r, now())),
        sort: (r) => jobFor(r, now()),
      },
      {
        id: "attained",
        title: "Attained",
        width: 96,
        rank: 11,
        number: true,
        text: (r) => gpuTime(r.attained_gpu_s),
        sort: (r) => r.attained_gpu_s,
      },
      { id: "starts", title: "Starts", width: 190, rank: 9, text: start },
      { id: "ahead", title: "Ahead", width: 180, rank: 10, text: ahead },
      {
        id: "why",
        title: "Why, or where",
        width: 170,
        rank: 8,
        grow: true,
        text: (r) =>
          (r.state === "running" ? [r.places.map((p) => p.host).join(" "), waitBrief(r), r.losses.stuck] : [r.reason])
            .filter(Boolean)
            .join("; "),
      },
    ],
  });
  const ended = h(
    "a",
    { class: "quiet-link", href: all ? "#/jobs" : "#/jobs?all=1" },
    all ? "hide ended" : "show ended",
  );
  view.el.querySelector(".heading").append(ended);
  return view;
}

export function tenantsView(page) {
  const of = (r) => page.model.rows("quotas").get(r.tenant);
  const share = (r) => (r.gpus ? r.used / r.gpus : null);
  return new ListView(page, {
    title: "Tenants",
    table: "tenants",
    tables: ["tenants", "quotas"],
    path: "/v1/tenants",
    open: (row) => `#/jobs?q=${encodeURIComponent(`tenant:${row.tenant}`)}`,
    empty:
      "No tenant has a quota: every job counts for tenant “default”, which is not limited. An operator adds one: agentctl tenant add ml --users ann,bob --quota 16",
    shown: (from) => from.rows("tenants"),
    columns: [
      { id: "tenant", title: "Tenant", width: 140, rank: 0, text: (r) => r.tenant },
      {
        id: "use",
        title: "Of its quota",
        width: 190,
        rank: 1,
        text: (r) => (r.gpus == null ? "not limited" : r.gpus ? percent(r.used / r.gpus) : "no GPU"),
        sort: share,
        bar: share,
      },
      {
        id: "used",
        title: "GPUs used",
        width: 96,
        rank: 2,
        number: true,
        text: (r) => count(r.used),
        sort: (r) => r.used,
      },
      {
        id: "quota",
        title: "Quota",
        width: 96,
        rank: 3,
        number: true,
        text: (r) => (r.gpus == null ? "no limit" : count(r.gpus)),
        sort: (r) => r.gpus,
      },
      {
        id: "beyond",
        title: "Beyond quota",
        width: 116,
        rank: 5,
        number: true,
        text: (r) => (of(r) ? count(of(r).opportunistic) : "?"),
        sort: (r) => of(r)?.opportunistic,
      },
      {
        id: "queued",
        title: "Jobs waiting",
        width: 110,
        rank: 4,
        number: true,
        text: (r) => (of(r) ? count(of(r).queued_jobs) : "?"),
        sort: (r) => of(r)?.queued_jobs,
      },
      {
        id: "users",
        title: "Users",
        width: 160,
        rank: 6,
        grow: true,
        text: (r) => (r.users ?? []).join(", ") || "none named",
      },
    ],
  });
}

const LATE_S = 1;

export function tensorsView(page) {
  const { model } = page;
  const job = (r) => model.rows("jobs").get(r.job);
  const step = (r) => job(r)?.seen?.timing?.step_s ?? (r.period_us != null ? r.period_us / 1e6 : null);
  return new ListView(page, {
    title: "Tensors",
    table: "tensors",
    tables: ["tensors", "jobs"],
    path: "/v1/tensors",
    open: (row) => jobLink(row.job),
    empty: "No host sums tensors now. A job that calls covey.tensors, or whose gradients are attached, appears here.",
    shown: (from) => from.rows("tensors"),
    note: (from) => {
      const late = [...from.rows("tensors").values()].filter((row) => row.waits_s > LATE_S && row.missing?.length);
      return late.map((row) =>
        alarm(
          `${row.job}: ${plural(row.missing.length, "rank")} not heard for ${seconds(row.waits_s)}: ranks ${row.missing.join(" ")}`,
        ),
      );
    },
    columns: [
      { id: "job", title: "Job", width: 80, rank: 0, text: (r) => r.job, link: (r) => jobLink(r.job) },
      {
        id: "host",
        title: "Summed at",
        width: 150,
        rank: 1,
        text: (r) => `${r.host}${r.by && r.by !== "aggd" ? `, ${r.by}` : ""}`,
      },
      {
        id: "joined",
        title: "Ranks",
        width: 84,
        rank: 3,
        number: true,
        text: (r) => `${r.joined} of ${r.workers}`,
        sort: (r) => r.workers,
      },
      { id: "step", title: "Step", width: 90, rank: 2, number: true, text: (r) => seconds(step(r)), sort: step },
      {
        id: "rounds",
        title: "Rounds",
        width: 92,
        rank: 5,
        number: true,
        text: (r) => count(r.rounds),
        sort: (r) => r.rounds,
      },
      {
        id: "in",
        title: "In",
        width: 90,
        rank: 6,
        number: true,
        text: (r) => bytes(r.received_bytes),
        sort: (r) => r.received_bytes,
      },
      {
        id: "out",
        title: "Out",
        width: 90,
        rank: 7,
        number: true,
        text: (r) => bytes(r.sent_bytes),
        sort: (r) => r.sent_bytes,
      },
      {
        id: "load",
        title: "Aggregator's load",
        width: 176,
        rank: 8,
        text: (r) => percent(r.load),
        sort: (r) => r.load,
        bar: (r) => r.load,
      },
      {
        id: "loss",
        title: "Slowed by",
        width: 96,
        rank: 9,
        number: true,
        text: (r) => percent(r.loss_measured ?? r.loss),
        sort: (r) => r.loss_measured ?? r.loss,
      },
      {
        id: "waits",
        title: "What each step waits for",
        width: 200,
        rank: 4,
        grow: true,
        text: (r) =>
          [
            job(r) ? waitWords(job(r)) : "",
            r.not_direct,
            r.refused,
            r.not_finite ? `${count(r.not_finite)} numbers not finite` : "",
          ]
            .filter(Boolean)
            .join("; ") || "not known",
      },
    ],
  });
}
