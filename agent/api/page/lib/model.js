// What this page knows of the rack: tables of rows by key, as the stream says, and a short memory of each GPU's use.
import { LENDS } from "./facts.js";

const EVENTS_MAX = 2000;
const COUNTING = ["times", "since_s", "up_s"]; // fields that count time on from the row's `as_of`, by the wall clock
const SAMPLES = 180; // of a GPU's use, at least SAMPLE_S apart
const SAMPLE_S = 5;

class Table {
  constructor() {
    this.rows = new Map();
    this.known = false; // false: nothing was said of it yet, which is not the same as empty
    this.as_of = null;
    this.unanswered = [];
  }
}

export class Model {
  constructor(names) {
    this.tables = Object.fromEntries(names.map((name) => [name, new Table()]));
    this.events = []; // newest last
    this.heard = new Set();
    this.uses = new Map(); // GPU -> samples [wall_s, share in use, bytes]
    this.host = ""; // who answers
    this.skew_s = 0; // the agent's wall clock less this browser's
    this.changed = new Set();
    this.listeners = new Set();
    this.scheduled = false;
  }

  rows(name) {
    return this.tables[name].rows;
  }

  now_s() {
    return Date.now() / 1000 + this.skew_s;
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  // One message of the stream.
  take(kind, said) {
    if (kind === "happened") this.happen(said);
    else if (kind === "snapshot") this.snapshot(said);
    else if (kind === "change") this.change(said);
  }

  snapshot(said) {
    const table = this.tables[said.table];
    if (!table) return;
    table.rows = new Map(Object.entries(said.rows));
    for (const row of table.rows.values()) row.as_of = said.as_of_wall_s;
    this.said(said.table, table, said);
    if (said.table === "gpus") for (const [key, row] of table.rows) this.sample(key, row, said.as_of_wall_s);
  }

  change(said) {
    const table = this.tables[said.table];
    if (!table) return;
    for (const [key, fields] of Object.entries(said.set ?? {})) {
      const row = { ...table.rows.get(key), ...fields };
      if (COUNTING.some((field) => field in fields)) row.as_of = said.as_of_wall_s;
      table.rows.set(key, row);
      if (said.table === "gpus") this.sample(key, row, said.as_of_wall_s);
    }
    for (const key of said.gone ?? []) {
      table.rows.delete(key);
      this.uses.delete(key);
    }
    this.said(said.table, table, said);
  }

  said(name, table, said) {
    table.known = true;
    table.as_of = said.as_of_wall_s;
    if (said.unanswered) table.unanswered = said.unanswered;
    this.skew_s = said.as_of_wall_s - Date.now() / 1000;
    this.note(name);
  }

  // An event of the hosts' event logs. A stream that begins anew tells those of before again.
  happen(event) {
    const key = `${event.wall_s} ${event.host} ${event.subject} ${event.event}`;
    if (this.heard.has(key)) return;
    this.heard.add(key);
    let at = this.events.length;
    while (at > 0 && this.events[at - 1].wall_s > event.wall_s) at--;
    this.events.splice(at, 0, event);
    if (this.events.length > EVENTS_MAX) this.events.shift();
    if (this.heard.size > 2 * EVENTS_MAX) this.heard = new Set([...this.heard].slice(EVENTS_MAX));
    this.note("happened");
  }

  sample(key, row, wall_s) {
    let found = this.uses.get(key);
    if (!found) this.uses.set(key, (found = []));
    const last = found.at(-1);
    if (last && wall_s - last[0] < SAMPLE_S) found.pop();
    found.push([last && wall_s - last[0] < SAMPLE_S ? last[0] : wall_s, row.utilization, row.memory_used_bytes]);
    if (found.length > SAMPLES) found.shift();
  }

  // Tell listeners once a frame, however many messages came.
  note(name) {
    this.changed.add(name);
    if (this.scheduled) return;
    this.scheduled = true;
    const tell = () => {
      this.scheduled = false;
      const changed = this.changed;
      this.changed = new Set();
      this.derived = null;
      for (const listener of this.listeners) listener(changed);
    };
    if (typeof requestAnimationFrame === "function") requestAnimationFrame(tell);
    else setTimeout(tell, 0);
  }

  // GPUs of each host in order, jobs by host, and what hosts lend: made once for each batch of changes, when asked for.
  get by() {
    if (this.derived) return this.derived;
    const gpus = new Map(),
      jobs = new Map(),
      lent = new Map(),
      borrowed = new Map();
    const add = (to, key, value) => (to.has(key) ? to.get(key).push(value) : to.set(key, [value]));
    for (const row of this.rows("gpus").values()) add(gpus, row.host, row);
    for (const rows of gpus.values()) rows.sort((a, b) => a.index - b.index);
    for (const job of this.rows("jobs").values()) {
      if (!job.over) for (const host of new Set(job.places.map((place) => place.host))) add(jobs, host, job);
    }
    for (const slab of this.rows("slabs").values()) {
      if (!slab.lender || !LENDS.has(slab.state)) continue;
      lent.set(slab.lender, (lent.get(slab.lender) ?? 0) + slab.size_bytes);
      borrowed.set(slab.borrower, (borrowed.get(slab.borrower) ?? 0) + slab.size_bytes);
    }
    this.derived = { gpus, jobs, lent, borrowed };
    return this.derived;
  }
}
