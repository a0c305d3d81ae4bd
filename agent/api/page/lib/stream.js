// The one stream of the agent, /v1/events: a snapshot of each table, then what changed. It is read by fetch and not by
// EventSource, which hides both a refusal's words and the comments by which a silent connection is told from a dead one.

const SILENT_S = 40; // the agent says something every 15 s
const RETRY_S = [0.5, 1, 2, 4, 8];

export class Stream {
  // take(kind, data): one message. told(state, words): "live", "cut", "refused" or "paused".
  constructor(tables, take, told) {
    this.path = `/v1/events?tables=${tables.join(",")}`;
    this.take = take;
    this.told = told;
    this.last_id = "";
    this.tries = 0;
    this.heard_s = null;
    this.stop = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    setInterval(() => this.stop && Date.now() / 1000 - this.heard_s > SILENT_S && this.stop.abort("silent"), 5000);
  }

  open() {
    if (this.stop || document.hidden) return;
    clearTimeout(this.timer);
    this.stop = new AbortController();
    this.heard_s = Date.now() / 1000;
    this.heard = false;
    const stop = this.stop;
    this.run(stop).catch((error) => stop === this.stop && this.ended(error));
  }

  // A hidden tab hears nothing, and costs the agent nothing; it resumes where it stopped.
  close() {
    clearTimeout(this.timer);
    if (!this.stop) return;
    this.stop.abort("hidden");
    this.stop = null;
    this.told("paused", "");
  }

  async run(stop) {
    const headers = this.last_id ? { "Last-Event-ID": this.last_id } : {};
    const answer = await fetch(this.path, { headers, signal: stop.signal });
    if (!answer.ok) {
      const said = await answer.json();
      throw Object.assign(new Error(`${said.what}: ${said.why}`), { refused: true });
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the agent ended the stream");
      this.heard_s = Date.now() / 1000;
      rest += value;
      const messages = rest.split("\n\n");
      rest = messages.pop();
      for (const message of messages) this.message(message);
      if (stop !== this.stop) return;
    }
  }

  message(text) {
    let kind = "message",
      data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) data += line.slice(5).trim();
      else if (line.startsWith("id:")) this.last_id = line.slice(3).trim();
    }
    if (!this.heard) this.told("live", "");
    this.heard = true;
    this.tries = 0;
    if (data) this.take(kind, JSON.parse(data));
  }

  ended(error) {
    this.stop = null;
    this.told(error.refused ? "refused" : "cut", error.message ?? String(error));
    this.timer = setTimeout(() => this.open(), RETRY_S[this.tries] * 1000);
    this.tries = Math.min(this.tries + 1, RETRY_S.length - 1);
  }
}
