// The rack as one agent knows it: four reads every two seconds, tables made of text only (never innerHTML), and the
// curves of the job that the address names (#job=j1).
"use strict";

let tones = null; // state -> CSS class, as the agent says (covey/core/tones.py)
const MIB = 1024 * 1024;

const seconds = (s) =>
  s == null ? "-" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const shown = (value) => (value == null || value === "" ? "-" : String(value));

const TABLES = {
  hosts: [
    ["host", (r) => r.host], ["state", (r) => r.state], ["leads", (r) => (r.leads ? "leader" : "")],
    ["since", (r) => seconds(r.since_s)], ["GPUs free", (r) => `${shown(r.gpus_free)} of ${shown(r.gpus_total)}`],
    ["GPUs out", (r) => r.gpus_why],
    ["slabs lent", (r) => r.slabs_lent], ["slabs free", (r) => r.slabs_free], ["seen", (r) => `${seconds(r.age_s)} ago`],
    ["note", (r) => (r.troubles || []).map((each) => `wrong: ${each.what}`).join("; ")],
  ],
  gpus: [
    ["host", (r) => r.host], ["GPU", (r) => r.index], ["model", (r) => r.model],
    ["job", (r) => [r.job, ...(r.beside || []).map((id) => `+${id}`)].filter(Boolean).join(" ")],
    ["memory used", (r) => `${Math.round(r.memory_used_bytes / MIB)} of ${Math.round(r.memory_total_bytes / MIB)} MiB`],
    ["busy", (r) => r.utilization === null ? "not known" : `${Math.round(r.utilization * 100)} %`],
    ["condition", (r) => [r.condition === "ok" ? "" : `${r.condition}: ${r.why}`, r.use].filter(Boolean).join("; ")],
  ],
  jobs: [
    ["job", (r) => r.id], ["name", (r) => r.name], ["tenant", (r) => r.tenant], ["state", (r) => r.state],
    ["workers", (r) => r.elastic ? `${r.workers}..${r.elastic.workers_max}, now ${r.elastic.processes}` : r.workers],
    ["GPUs", (r) => r.gpus], ["step", (r) => r.step],
    ["places", (r) => r.places.map((p) => p.host).join(" ")], ["why", (r) => r.reason],
  ],
  slabs: [
    ["volume", (r) => r.volume], ["slab", (r) => r.index], ["borrower", (r) => r.borrower], ["state", (r) => r.state],
    ["lender", (r) => r.lender], ["requests/s", (r) => r.requests_per_s.toFixed(1)],
  ],
};

function link(id) {
  const made = document.createElement("a");
  made.href = `#job=${encodeURIComponent(id)}`;
  made.textContent = id;
  return made;
}

function table(name, rows) {
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  for (const [title] of TABLES[name]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const [title, read] of TABLES[name]) {
      const cell = line.insertCell();
      const text = shown(read(row));
      if (title === "job" && name === "jobs") cell.append(link(text));
      else cell.textContent = text;
      if (title === "state" && Object.hasOwn(tones, text)) cell.className = tones[text];
    }
  }
  if (!rows.length) {
    const cell = body.insertRow().insertCell();
    cell.colSpan = TABLES[name].length;
    cell.textContent = "none";
  }
  return made;
}

async function read(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5000) });
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${body.what}: ${body.why}`);
  return body;
}

// What is wrong with hosts, in words, with what to type.
const wrong = (body) =>
  body.data.flatMap((row) => (row.troubles || []).map((each) => `${row.host}: ${each.what}; next: ${each.next}`));

// Who did not answer, in words, as agentctl says it; [] for a list that is whole.
const missing = (body) =>
  (body.unanswered || []).map((each) =>
    `incomplete: ${each.host} ${each.age_s == null ? "is missing" : `is shown as it was ${seconds(each.age_s)} ago`} (${each.why})`);

function alarm(text) {
  const line = document.createElement("p");
  line.className = "alarm";
  line.setAttribute("role", "alert");
  line.textContent = text;
  return line;
}

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 640;
const HEIGHT = 120;
const brief = (value) => String(Number(value.toPrecision(5)));

// Values over steps as a line: [[step, value], ...], with the steps ascending.
function curve(title, points) {
  const values = points.map(([, value]) => value);
  const [low, high, first, last] = [Math.min(...values), Math.max(...values), points[0][0], points.at(-1)[0]];
  const x = (step) => (last > first ? (WIDTH * (step - first)) / (last - first) : WIDTH / 2);
  const y = (value) => (high > low ? (HEIGHT - 8) * (1 - (value - low) / (high - low)) + 4 : HEIGHT / 2);
  const made = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = `${title} ${brief(values.at(-1))}; ${brief(low)} to ${brief(high)} in steps ${first} to ${last}`;
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", caption.textContent);
  const line = document.createElementNS(SVG, "polyline");
  const at = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  line.setAttribute("points", at.length > 1 ? at.join(" ") : `${at[0]} ${at[0]}`);
  drawing.append(line);
  made.append(caption, drawing);
  return made;
}

// The curves of the job in the address: loss first, other metrics, step time.
async function showJob() {
  const named = location.hash.startsWith("#job=") ? location.hash.slice(5) : "";
  document.getElementById("job").hidden = !named;
  if (!named) return;
  const parts = [];
  try {
    const id = decodeURIComponent(named); // URIError where somebody typed it
    document.getElementById("job-title").textContent = `Job ${id}`;
    const { points, unanswered } = (await read(`/v1/jobs/${encodeURIComponent(id)}/curve`)).data;
    const names = [...new Set(points.flatMap((point) => Object.keys(point.metrics)))].sort();
    if (names.includes("loss")) names.unshift(...names.splice(names.indexOf("loss"), 1));
    const curves = names.map((name) => [name, (point) => point.metrics[name]]);
    for (const [title, value] of [...curves, ["step time, s", (point) => point.step_s]]) {
      const found = points.map((point) => [point.step, value(point)]).filter(([, each]) => Number.isFinite(each));
      if (found.length) parts.push(curve(title, found));
    }
    parts.push(...unanswered.map((host) => alarm(`${host} did not answer, so steps may be missing`)));
    if (!points.length) parts.push(alarm("no step of this job is known: none was reported, or its curves are no longer kept"));
  } catch (error) {
    parts.push(alarm(error.message));
  }
  document.getElementById("curves").replaceChildren(...parts);
}

async function show(name, path) {
  const body = await read(path);
  const alarms = name === "hosts" ? wrong(body) : missing(body);
  document.getElementById(name).replaceChildren(...alarms.map(alarm), table(name, body.data));
  return body;
}

async function refresh() {
  const trouble = document.getElementById("trouble");
  try {
    tones ??= await read("/states.json");
    const [hosts] = await Promise.all([
      show("hosts", "/v1/hosts"), show("jobs", "/v1/jobs?all=1"),
      show("gpus", "/v1/gpus?timeout_s=1"), show("slabs", "/v1/slabs?timeout_s=1"), showJob(),
    ]);
    const alive = hosts.data.filter((row) => row.state === "alive").length;
    const sick = hosts.data.filter((row) => (row.troubles || []).length).length;
    const leader = hosts.data.find((row) => row.leads);
    document.getElementById("summary").textContent =
      `${hosts.host} knows: ${alive} of ${hosts.data.length} hosts alive${sick ? `, ${sick} wrong` : ""}, ` +
      `${leader ? `${leader.host} leads` : "no leader now"}, as of ${new Date(hosts.as_of_wall_s * 1000).toLocaleTimeString()}`;
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = `this page may be out of date: ${error.message}`;
    trouble.hidden = false;
  }
  setTimeout(refresh, document.hidden ? 10000 : 2000);
}

addEventListener("hashchange", showJob);
refresh();
