// What rows mean, in words and letters: pure, shared by all views, and run by Node in tests.
import { NOT_KNOWN, percent, plural, seconds } from "./dom.js";

// The states of a GPU, in the order in which they matter: letter, and words for people. Never told by colour alone.
export const GPU_STATES = {
  busy: { letter: "B", words: "busy" },
  held: { letter: "H", words: "held" },
  idle: { letter: "i", words: "held but idle" },
  shared: { letter: "S", words: "shared" },
  free: { letter: "·", words: "free" },
  foreign: { letter: "F", words: "foreign" },
  sick: { letter: "!", words: "sick" },
  unknown: { letter: "?", words: NOT_KNOWN },
  gone: { letter: "–", words: "host gone" },
};
export const GPU_HELP = {
  busy: "a job holds it, and it computes",
  held: "a job holds it; it computes little now, or its driver does not say",
  idle: "a job holds it and has not used it for minutes",
  shared: "several jobs share it",
  free: "no job holds it",
  foreign: "processes that no job started use it; it is given to no job",
  sick: "it takes no job: it is lost, or to be emptied",
  unknown: "its state is not known; it takes no job",
  gone: "its host is gone or away",
};
const AWAY = new Set(["gone", "away", "left"]);
const BUSY = 0.05;

export function gpuState(gpu) {
  const beside = gpu.beside ?? [];
  if (AWAY.has(gpu.host_state)) return "gone";
  if (gpu.condition === "unknown") return "unknown";
  if (gpu.condition !== "ok" && gpu.condition !== "degraded") return "sick";
  const jobs = (gpu.job ? 1 : 0) + beside.length;
  if (!jobs) return gpu.use ? "foreign" : "free";
  if (gpu.use) return "idle";
  if (jobs > 1) return "shared";
  return gpu.utilization != null && gpu.utilization >= BUSY ? "busy" : "held";
}

export const gpuJobs = (gpu) => [gpu.job, ...(gpu.beside ?? [])].filter(Boolean);
export const gpuNote = (gpu) =>
  [gpu.condition === "ok" ? "" : `${gpu.condition}: ${gpu.why}`, gpu.use].filter(Boolean).join("; ");

// One character for each GPU of a host; hosts whose GPUs are not known yet are shown by what they gossip.
export function hostTiles(host, gpus) {
  if (gpus?.length) return gpus.map((gpu) => gpuState(AWAY.has(host.state) ? { ...gpu, host_state: host.state } : gpu));
  return Array(host.gpus_total ?? 0).fill(AWAY.has(host.state) ? "gone" : "unknown");
}

export function tally(states) {
  const found = {};
  for (const state of states) found[state] = (found[state] ?? 0) + 1;
  return found;
}

export const tallyWords = (found) =>
  Object.keys(GPU_STATES)
    .filter((state) => found[state])
    .map((state) => `${found[state]} ${GPU_STATES[state].words}`)
    .join(", ");

// Slabs in these states are on their lender.
export const LENDS = new Set(["mapped", "moving", "reopening", "filling", "recovering"]);

// What is wrong with a host, in words; "" where nothing is.
export function hostNote(host) {
  const said = (host.troubles ?? []).map((each) => each.what);
  if (host.gpus_why) said.push(host.gpus_why);
  if (host.plugins_failed?.length) said.push(`failed: ${host.plugins_failed.join(", ")}`);
  if (host.no_room) said.push(host.no_room);
  if (host.drained_by) said.push(`drained by ${host.drained_by}${host.closed_why ? `: ${host.closed_why}` : ""}`);
  if (host.cordoned_by) said.push(`cordoned by ${host.cordoned_by}${host.closed_why ? `: ${host.closed_why}` : ""}`);
  if (host.state === "suspect" && host.suspected_by) said.push(`suspected by ${host.suspected_by}`);
  for (const [job, why] of Object.entries(host.gpus_held ?? {}))
    said.push(`${job} holds ${why === "idle" ? "idle GPUs" : `GPUs that are ${why}`}`);
  return said.join("; ");
}

// A job's place among those of its kind that wait; null: it does not wait for GPUs.
export const place = (job) => job.turn?.place ?? null;

// Who is ahead of a waiting job, in words.
export const ahead = (job) => job.turn?.ahead ?? "";

export const jobName = (job) => {
  const tasks = job.array || (job.task ?? "").split("[")[1]?.replace("]", "");
  return job.name && tasks ? `${job.name}[${tasks}]` : job.name;
};
export const jobClass = (job) =>
  !job.runs_as || job.runs_as === job.job_class ? job.job_class : `${job.runs_as} (was ${job.job_class})`;
export const jobOwner = (job) => job.user || (job.uid == null ? "the agent" : `uid ${job.uid}`);
export const jobWorkers = (job) =>
  job.elastic
    ? `${job.workers}..${job.elastic.workers_max}${job.elastic.processes && !job.over ? `, now ${job.elastic.processes}` : ""}`
    : String(job.workers);

// How long a job has waited, or has run since its first start, or took. `now_s`: the agent's wall clock.
export const jobFor = (job, now_s) => job.times.for_s + (job.over ? 0 : Math.max(0, now_s - job.as_of));

// When a waiting job will start, in words; `start`: its row of /v1/starts.
export function startWords(start) {
  if (!start) return "";
  if (start.p50_s == null) return `start ${start.basis}`;
  return start.p90_s ? `starts ${startBrief(start)}, ${start.basis}` : `starts ${startBrief(start)}: ${start.basis}`;
}

// The same in a few words.
export function startBrief(start) {
  if (!start) return "";
  if (start.p50_s == null) return "not known";
  if (!start.p90_s && start.p90_s != null) return "at once";
  const p90 = start.p90_s == null ? "p90 not known" : `${seconds(start.p90_s)} (p90)`;
  return `within ${seconds(start.p50_s)} (p50), ${p90}`;
}

// GPUs times time.
export function gpuTime(gpu_s) {
  if (gpu_s < 3600) return `${(gpu_s / 60).toFixed(1)} GPU·min`;
  return `${(gpu_s / 3600).toFixed(gpu_s < 36000 ? 2 : 0)} GPU·h`;
}

// What each step of a job waits for: [[what, share]], the largest first; [] where too few steps were reported.
export function waits(job) {
  const timing = job.seen?.timing;
  if (!timing?.step_s) return [];
  const parts = [
    ["data", timing.input_s],
    ["other ranks", timing.communicate_s],
    ["turns of other jobs", timing.turns_s],
  ];
  parts.push(["the device", Math.min(job.metrics?.device_wait_s ?? 0, timing.step_s)]);
  return parts
    .map(([what, s]) => [what, s / timing.step_s])
    .filter(([, share]) => share >= 0.01)
    .sort((a, b) => b[1] - a[1]);
}

export const waitWords = (job) =>
  waits(job)
    .map(([what, share]) => `${percent(share)} of each step waits for ${what}`)
    .join("; ");

// The same in a few words, of the longest wait alone.
export const waitBrief = (job) => {
  const [longest] = waits(job);
  return longest && longest[1] >= 0.1 ? `${percent(longest[1])} of each step waits for ${longest[0]}` : "";
};

// The hosts that did not answer, in words, as agentctl says it.
export const missing = (unanswered) =>
  unanswered.map(
    (each) =>
      `${each.host} ${each.age_s == null ? "is missing" : `is shown as it was ${seconds(each.age_s)} ago`} (${each.why})`,
  );

// Words of a filter: `word`, `-word`, `field:word`; all must hold.
export function matcher(text) {
  const wanted = text
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((said) => {
      const not = said.startsWith("-") && said.length > 1;
      const word = not ? said.slice(1) : said;
      const [field, rest] = word.split(/:(.*)/s);
      return { not, field, rest, word };
    });
  return (row, words) =>
    wanted.every(({ not, field, rest, word }) => {
      const named = rest && row[field] !== undefined; // else the colon is a part of the word
      const within = named ? String(row[field] ?? "") : words;
      return within.toLowerCase().includes(named ? rest : word) !== not;
    });
}

// gpu2 before gpu10.
const NATURAL = new Intl.Collator("en", { numeric: true });
export const natural = (a, b) => NATURAL.compare(a, b);

// What became of a job and when, from its events: [{state, from_s, to_s}], to_s null for what goes on.
const PHASES = new Map([
  ["submitted", "queued"],
  ["granted", "placing"],
  ["placed", "running"],
  ["stopping", "stopping"],
  ["queued again", "queued"],
  ["taken back", "queued"],
  ["not placed", "queued"],
  ["hosts lost", "healing"],
  ["replaced", "running"],
  ["to move", "moving"],
]);
const ENDS = new Set(["done", "failed", "cancelled"]);

export function phases(events) {
  const found = [];
  for (const event of events) {
    const last = found.at(-1),
      state = PHASES.get(event.event);
    const goes_on = last && last.to_s == null;
    if (ENDS.has(event.event) && goes_on) last.to_s = event.wall_s;
    if (!state || (goes_on && last.state === state)) continue;
    if ((state === "healing" || state === "moving") && last?.state !== "running") continue;
    if (goes_on) last.to_s = event.wall_s;
    found.push({ state, from_s: event.wall_s, to_s: null });
  }
  return found;
}

// What happened to a job beside its states: [{words, wall_s}], for marks on its timeline.
const MARKS = new Map([
  ["replaced", "ranks replaced"],
  ["hosts lost", "host lost"],
  ["grew", "resized: grew"],
  ["shrank", "resized: shrank"],
  ["arranged anew", "arranged anew"],
  ["demoted", "demoted"],
  ["upgraded", "upgraded"],
  ["promoted", "promoted"],
  ["to move", "moved"],
  ["held", "held"],
  ["released", "released"],
]);
export function marks(events) {
  return events.flatMap((event) => {
    const preempted = event.event === "stopping" && /preempt/.test(event.reason) ? "preempted" : undefined;
    const words = preempted ?? MARKS.get(event.event);
    return words ? [{ words, wall_s: event.wall_s }] : [];
  });
}

export const eventKey = (event) => `${event.wall_s}/${event.host}/${event.subject}/${event.event}`;
export const subjectWord = (subject) => subject.replace(/^(job|host)\//, "");

// Where a subject of events has a page of its own; "" where it has none.
export function subjectPath(subject) {
  if (/^host\//.test(subject)) return `#/host/${encodeURIComponent(subject.slice(5))}`;
  if (/^(job\/)?j\d+$/.test(subject)) return `#/job/${subject.replace("job/", "")}`;
  return "";
}
