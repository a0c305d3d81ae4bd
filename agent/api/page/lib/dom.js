// Elements made of text only, never of markup, and numbers, times and sizes in words.

// An element: h("a", {class: "x", href: "#/", onclick: f}, "text", child). Children that are null are left out.
export function h(tag, given = {}, ...children) {
  return fill(document.createElement(tag), given, children);
}

const SVG = "http://www.w3.org/2000/svg";

// The same of SVG.
export function s(tag, given = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), given, children);
}

function fill(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null && child !== false) made.append(child);
  return made;
}

// Sets a text only where it differs: what did not change is not painted anew.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const NOT_KNOWN = "not known";

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return NOT_KNOWN;
  const s = Math.max(0, value);
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${Number((s * 1000).toPrecision(3))} ms`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(1)} d`;
}

export function bytes(value) {
  if (value == null) return NOT_KNOWN;
  let left = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (left < 1024) return `${unit === "B" || left >= 100 ? Math.round(left) : Number(left.toPrecision(3))} ${unit}`;
    left /= 1024;
  }
  return left >= 1024 ? `${(left / 1024).toFixed(1)} PiB` : `${Number(left.toPrecision(3))} TiB`;
}

export const percent = (share) => (share == null ? NOT_KNOWN : `${Math.round(share * 100)} %`);
const GROUPED = new Intl.NumberFormat("en");
export const count = (value) => (value == null ? NOT_KNOWN : GROUPED.format(value));
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
export const brief = (value) => String(Number(value.toPrecision(5)));

const pad = (n) => String(n).padStart(2, "0");

// A wall time: today's as 14:03:22, others with their date.
export function clock(wall_s) {
  if (!wall_s) return NOT_KNOWN;
  const at = new Date(wall_s * 1000),
    now = new Date();
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  if (at.toDateString() === now.toDateString()) return time;
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${time}`;
}

export class Refusal extends Error {
  // What the agent refused, in its three lines: what, why, next.
  constructor(said) {
    super(`${said.what}: ${said.why}`);
    this.said = said;
  }
}

// One read of the agent's API: the whole answer. Refusal: it said no; Error: it did not answer.
export async function read(path, wait_s = 10) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(wait_s * 1000) });
  const body = await answer.json();
  if (!answer.ok) throw new Refusal(body);
  return body;
}
