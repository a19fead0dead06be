// src/dom.ts
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children.filter((child) => child !== null));
  return element;
}
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.filter((child) => child !== null));
  return element;
}
function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
}
function byId(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new Error(`index.html has no ${type.name} #${id}`);
  return element;
}

// src/chart.ts
var BAR = 34;
var GAP = 10;
var HEIGHT = 72;
var TOP = 16;
var BOTTOM = 18;
var AcceptanceChart = class {
  element;
  bars = [];
  constructor(numDrafts) {
    const width = numDrafts * (BAR + GAP) + GAP;
    const height = TOP + HEIGHT + BOTTOM;
    this.element = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    for (let place = 0; place < numDrafts; place++) {
      const x = GAP + place * (BAR + GAP);
      const middle = x + BAR / 2;
      const all = draw("rect", { class: "all", x, width: BAR, y: TOP, height: HEIGHT });
      const bar = draw("rect", { class: "bar", x, width: BAR, y: TOP + HEIGHT, height: 0 });
      bar.style.setProperty("--depth", depth(place + 1, numDrafts));
      const label = draw("text", { class: "value", x: middle, y: TOP + HEIGHT - 4, "text-anchor": "middle" });
      const name = draw("text", { class: "name", x: middle, y: height - 4, "text-anchor": "middle" }, String(place + 1));
      this.element.append(all, bar, label, name);
      this.bars.push({ bar, label });
    }
    this.element.append(draw("line", { class: "axis", x1: 0, x2: width, y1: TOP + HEIGHT, y2: TOP + HEIGHT }));
    this.show(new Array(numDrafts).fill(0));
  }
  show(shares) {
    this.bars.forEach(({ bar, label }, place) => {
      const share = shares[place] ?? 0;
      const height = Math.round(share * HEIGHT * 10) / 10;
      bar.setAttribute("y", String(TOP + HEIGHT - height));
      bar.setAttribute("height", String(height));
      label.setAttribute("y", String(TOP + HEIGHT - height - 4));
      label.textContent = percent(share);
    });
    const values = shares.map((share, place) => `position ${place + 1}: ${percent(share)}`).join(", ");
    this.element.setAttribute("aria-label", `Share of steps that accepted the draft at each position. ${values}`);
  }
};
function percent(share) {
  return `${Math.round(share * 100)}%`;
}
function depth(position, numDrafts) {
  return numDrafts > 1 ? ((position - 1) / (numDrafts - 1)).toFixed(3) : "0";
}

// src/describe.ts
function visible(text) {
  if (!text) return "(no text of its own)";
  return `“${text.replaceAll("\n", "↵").replaceAll("	", "⇥").replace(/^ | $/g, "␣")}”`;
}
function describe(token, numDrafts) {
  switch (token.source) {
    case "draft":
      return `accepted draft, position ${token.position} of ${numDrafts}`;
    case "bonus":
      return "bonus token: the model's own, after all drafts of the step were accepted";
    case "replacement":
      return "replacement: the model's own token, instead of the first rejected draft";
    case "plain":
      return "plain: the model's own token, where nothing was drafted";
  }
}
function describeAloud(token, numDrafts) {
  const said = `${visible(token.text)}, ${describe(token, numDrafts)}`;
  if (token.source !== "replacement") return said;
  return `${said}. Rejected: ${token.rejected.map((draft) => visible(draft.text)).join(", ")}`;
}
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
function number(value, digits, unit = "") {
  return value === null ? "–" : value.toFixed(digits) + unit;
}

// src/tally.ts
var Tally = class {
  /** `numDrafts` is K: how many drafts a step can have; `askedAt` is in milliseconds, as all times are. */
  constructor(numDrafts, askedAt) {
    this.askedAt = askedAt;
    this.acceptedAt = new Array(numDrafts).fill(0);
  }
  askedAt;
  numTokens = 0;
  /** Steps for which something was drafted. */
  numSteps = 0;
  numAccepted = 0;
  /** Steps that accepted the draft at position 1, 2, .. */
  acceptedAt;
  firstAt = 0;
  lastAt = 0;
  insideStep = false;
  measured = null;
  /** Count tokens that came at `now`. */
  add(tokens, now) {
    if (!tokens.length) return;
    if (!this.numTokens) this.firstAt = now;
    this.lastAt = now;
    this.numTokens += tokens.length;
    for (const token of tokens) {
      if (token.source === "plain") continue;
      if (!this.insideStep) this.numSteps += 1;
      this.insideStep = token.source === "draft";
      if (token.source === "draft") {
        this.numAccepted += 1;
        this.acceptedAt[token.position - 1] = (this.acceptedAt[token.position - 1] ?? 0) + 1;
      }
    }
  }
  /** The server's own measurements, which stand from now on. */
  end(metrics) {
    this.measured = metrics;
  }
  get tokensPerSecond() {
    if (this.measured) return this.measured.tokens_per_second ?? null;
    const seconds = (this.lastAt - this.firstAt) / 1e3;
    return seconds > 0 ? (this.numTokens - 1) / seconds : null;
  }
  get firstTokenSeconds() {
    if (this.measured) return this.measured.time_to_first_token_ms / 1e3;
    return this.numTokens ? (this.firstAt - this.askedAt) / 1e3 : null;
  }
  /** Tokens of a drafted step, on average; null before there is one. */
  get acceptanceLength() {
    return this.numSteps ? 1 + this.numAccepted / this.numSteps : null;
  }
  /** Share of drafted steps that accepted the draft at each position. */
  get shares() {
    return this.acceptedAt.map((count2) => this.numSteps ? count2 / this.numSteps : 0);
  }
};

// src/answer.ts
var ENDINGS = {
  length: "Ended at the length limit.",
  stopped: "Stopped."
};
var Answer = class {
  constructor(options) {
    this.options = options;
    const { numDrafts, heading } = options;
    this.tally = new Tally(numDrafts, 0);
    this.text = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Answer" });
    this.chart = numDrafts ? new AcceptanceChart(numDrafts) : null;
    const figure = this.chart ? make("figure", {}, this.chart.element, make("figcaption", {}, "Share of steps that accepted the draft at each position")) : null;
    const facts = make("div", { class: "facts" }, this.numbers, figure);
    const title = make("h2", {}, heading);
    this.element = make("article", { class: "answer", "aria-busy": "true" }, title, this.text, this.note, facts);
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.text.addEventListener("blur", () => this.leave());
    this.text.addEventListener("pointerover", (event) => this.onPointer(event));
    this.text.addEventListener("pointerleave", () => this.leave());
    this.text.addEventListener("click", (event) => this.onPointer(event));
    this.update();
  }
  options;
  element;
  tally;
  tokens = [];
  text;
  note = make("p", { class: "note", hidden: "" });
  numbers = make("dl", { class: "numbers" });
  chart;
  current = -1;
  get content() {
    return this.tokens.map(({ token }) => token.text).join("");
  }
  /** It has been asked for. */
  begin(now) {
    this.tally = new Tally(this.options.numDrafts, now);
  }
  add(tokens, now) {
    this.tally.add(tokens, now);
    for (const token of tokens) {
      const span = make("span", { class: `token ${token.source}` }, token.text);
      if (token.source === "draft") span.style.setProperty("--depth", depth(token.position, this.options.numDrafts));
      this.tokens.push({ token, span });
      this.text.append(span);
    }
    this.update();
  }
  measure(metrics) {
    this.tally.end(metrics);
    this.update();
  }
  /** Nothing more will come. `reason` is the server's, or "stopped". */
  end(reason) {
    this.element.setAttribute("aria-busy", "false");
    this.say(ENDINGS[reason] ?? "");
    const label = `Answer of ${this.tokens.length} tokens; the arrow keys step through them`;
    this.text.setAttribute("aria-label", label);
    this.update();
  }
  /** It ended in an error, which `again` can try to undo. */
  fail(message, again) {
    this.end("error");
    this.say(message);
    this.note.classList.add("error");
    this.note.setAttribute("role", "alert");
    if (again) {
      const button = make("button", { type: "button" }, "Try again");
      button.addEventListener("click", again, { once: true });
      this.note.append(" ", button);
    }
  }
  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }
  update() {
    const { tally } = this;
    const facts = [
      ["Tokens per second", number(tally.tokensPerSecond, 1)],
      ["Tokens", String(tally.numTokens)],
      ["First token after", number(tally.firstTokenSeconds, 2, " s")]
    ];
    if (this.chart) {
      this.chart.show(tally.shares);
      facts.splice(1, 0, ["Acceptance length", number(tally.acceptanceLength, 2)]);
    }
    const terms = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.numbers.replaceChildren(...terms);
  }
  // ---- looking at a token ------------------------------------------------------------------
  onKey(event) {
    const last = this.tokens.length - 1;
    const places = {
      ArrowRight: Math.min(this.current + 1, last),
      ArrowLeft: Math.max(this.current - 1, 0),
      Home: 0,
      End: last
    };
    if (event.key === "Escape") this.leave();
    const place = places[event.key];
    if (place === void 0 || last < 0) return;
    event.preventDefault();
    this.look(place);
    const found = this.tokens[place];
    if (found) this.options.announce(describeAloud(found.token, this.options.numDrafts));
  }
  onPointer(event) {
    const place = this.tokens.findIndex(({ span }) => span === event.target);
    if (place >= 0) this.look(place);
  }
  look(place) {
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = place;
    const found = this.tokens[place];
    if (!found) return;
    found.span.classList.add("current");
    found.span.scrollIntoView({ block: "nearest" });
    const before = this.tokens[place - 1]?.token;
    const position = before?.source === "draft" ? before.position + 1 : 1;
    this.options.card.show(found.token, this.options.numDrafts, position, found.span);
  }
  leave() {
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = -1;
    this.options.card.hide();
  }
};

// src/sse.ts
var EventParser = class {
  rest = "";
  /** The data of every event that this piece completes. */
  feed(piece) {
    const blocks = (this.rest + piece).replaceAll("\r\n", "\n").split("\n\n");
    this.rest = blocks.pop() ?? "";
    return blocks.map(dataOf).filter((data) => data !== null);
  }
};
function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(line.startsWith("data: ") ? 6 : 5)).join("\n") : null;
}

// src/api.ts
var ApiError = class extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
  status;
  retryAfter;
};
var KEY = "draftloop-api-key";
var Api = class {
  get key() {
    return sessionStorage.getItem(KEY);
  }
  set key(key) {
    sessionStorage.setItem(KEY, key);
  }
  /** Raises ApiError. */
  async info() {
    return await (await this.fetch("server_info")).json();
  }
  /** What an answer is made of, as it comes. Raises ApiError; aborting raises an AbortError. */
  async *chat(messages, options, signal) {
    const body = {
      messages,
      temperature: options.temperature,
      max_tokens: options.maxTokens,
      speculative: { enabled: options.speculation },
      stream: true,
      stream_options: { include_usage: true },
      return_token_sources: true
    };
    const response = await this.fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal
    });
    yield* readChat(response.body ?? new ReadableStream());
  }
  async fetch(path, init = {}) {
    const headers = new Headers(init.headers);
    if (this.key) headers.set("Authorization", `Bearer ${this.key}`);
    let response;
    try {
      response = await fetch(path, { ...init, headers });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
};
async function refusal(response) {
  const wait = Number(response.headers.get("Retry-After"));
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
  }
  return new ApiError(response.status, message, wait > 0 ? wait : null);
}
async function* readChat(body) {
  const parser = new EventParser();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (; ; ) {
      const { value, done } = await reader.read();
      if (done) break;
      for (const data of parser.feed(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield* chatEvents(JSON.parse(data));
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => void 0);
  }
  throw new ApiError(0, "The connection ended before the answer was complete.");
}
function* chatEvents(chunk) {
  if (chunk.error) throw new ApiError(500, chunk.error.message);
  for (const choice of chunk.choices) {
    if (choice.token_sources?.length) yield { kind: "tokens", tokens: choice.token_sources };
    if (choice.finish_reason) yield { kind: "finished", reason: choice.finish_reason };
  }
  if (chunk.metrics) yield { kind: "metrics", metrics: chunk.metrics };
}

// src/coverage.ts
function coverageTables(report) {
  const byPhase = /* @__PURE__ */ new Map();
  for (const row of report.rows) byPhase.set(row.phase, [...byPhase.get(row.phase) ?? [], row]);
  const tables = [
    { unit: "rows", sizes: [], phases: [] },
    { unit: "tokens", sizes: [], phases: [] }
  ];
  for (const [name, rows] of byPhase) {
    const table = tables[rows.some((row) => row.ragged) ? 1 : 0];
    if (table) table.phases.push(phaseCoverage(name, rows, table.unit));
  }
  for (const table of tables) {
    const sizes = new Set(table.phases.flatMap((phase) => [...phase.cells.keys()]));
    table.sizes = [...sizes].sort((a, b) => a - b);
  }
  return tables.filter((table) => table.phases.length);
}
function phaseCoverage(name, rows, unit) {
  return {
    name,
    mode: rows[0]?.mode ?? "NONE",
    reason: rows.map((row) => row.reason).find((reason) => reason) ?? "",
    cells: new Map(rows.map((row) => [row[unit], row])),
    replays: rows.reduce((sum, row) => sum + row.replays, 0),
    eagerRuns: rows.reduce((sum, row) => sum + row.eager_runs, 0)
  };
}
function coverageSummary(report) {
  const replays = report.rows.reduce((sum, row) => sum + row.replays, 0);
  const eager = report.rows.reduce((sum, row) => sum + row.eager_runs, 0);
  if (!replays && !eager) return `${report.cudagraph_mode}; nothing has run yet`;
  return `${report.cudagraph_mode}; ${count(replays, "replay")}, ${count(eager, "eager run")}`;
}
function count(number2, noun) {
  return `${number2.toLocaleString("en")} ${noun}${number2 === 1 ? "" : "s"}`;
}

// src/coverage_view.ts
var MODES = { FULL: "full", PIECEWISE: "pieces", NONE: "eager" };
var AboutServer = class {
  summary = byId("coverage-summary", HTMLSpanElement);
  tables = byId("coverage-tables", HTMLDivElement);
  onlyRun = byId("only-run", HTMLInputElement);
  settings = byId("settings", HTMLDivElement);
  report = null;
  constructor() {
    this.onlyRun.addEventListener("change", () => this.draw());
  }
  show(info) {
    this.report = info.graphs;
    this.draw();
    const head = make("tr", {}, ...["Setting", "Value", "Why"].map((name) => make("th", { scope: "col" }, name)));
    const rows = info.settings.map(
      ({ name, value, reason }) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value), make("td", {}, reason))
    );
    this.settings.replaceChildren(scrolling("Settings", make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  }
  draw() {
    if (!this.report) return;
    this.summary.textContent = coverageSummary(this.report);
    const tables = coverageTables(this.report).map((table) => this.table(table));
    this.tables.replaceChildren(...tables.filter((table) => table !== null), ...loops(this.report.loops));
    if (!this.tables.childElementCount) this.tables.append(make("p", { class: "note" }, "Nothing has run yet."));
  }
  table({ unit, sizes, phases }) {
    const shown = phases.filter((phase) => !this.onlyRun.checked || phase.replays || phase.eagerRuns);
    if (!shown.length) return null;
    const what = unit === "rows" ? "Decoding: phase by number of rows" : "Prompts: phase by number of tokens";
    const columns = ["replays", "eager", ...sizes.map(String)];
    const head = make("tr", {}, make("th", { scope: "col" }, "Phase"), ...columns.map((name) => make("th", { scope: "col" }, name)));
    const table = make("table", { class: "coverage" }, make("caption", {}, what), make("thead", {}, head));
    table.append(make("tbody", {}, ...shown.map((phase) => phaseRow(phase, sizes))));
    return scrolling(what, table);
  }
};
function phaseRow(phase, sizes) {
  const name = make("th", { scope: "row" }, phase.name, phase.reason ? make("small", {}, phase.reason) : null);
  const cells = sizes.map((size) => cell(phase.cells.get(size)));
  const counts = [phase.replays, phase.eagerRuns].map((count2) => make("td", { class: "count" }, count2.toLocaleString("en")));
  if (phase.eagerRuns) counts[1]?.classList.add("eager-runs");
  return make("tr", {}, name, ...counts, ...cells);
}
function cell(row) {
  if (!row) return make("td", { class: "cell" }, "·");
  const mode = row.captured ? row.mode : "NONE";
  const runs = row.replays + row.eager_runs;
  const time = row.ms === null ? null : `${row.ms.toFixed(2)} ms`;
  const hint = [row.reason, time, `${row.replays} replays, ${row.eager_runs} eager runs`].filter(Boolean).join("; ");
  const classes = ["cell", mode.toLowerCase(), runs ? "used" : ""].join(" ").trim();
  return make("td", { class: classes, title: hint }, MODES[mode] ?? mode.toLowerCase());
}
function loops(rows) {
  if (!rows.length) return [];
  const iterations = rows.reduce((sum, row) => sum + row.iterations, 0);
  const launches = rows.reduce((sum, row) => sum + row.launches, 0);
  const text = `Device loop: ${iterations.toLocaleString("en")} iterations in ${launches.toLocaleString("en")} launches.`;
  return [make("p", {}, text)];
}
function scrolling(name, table) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
}

// src/token_card.ts
var TokenCard = class {
  element = byId("token-card", HTMLDivElement);
  anchor = null;
  constructor() {
    document.addEventListener("scroll", () => this.place(), { passive: true });
  }
  /** `position` is that of the first rejected draft. */
  show(token, numDrafts, position, beside) {
    this.element.replaceChildren(
      make("p", { class: "token-text" }, visible(token.text)),
      make("p", {}, sentence(describe(token, numDrafts)))
    );
    if (token.source === "replacement") {
      const drafts = token.rejected.map((draft) => make("li", {}, make("s", {}, visible(draft.text))));
      this.element.append(make("p", { class: "caption" }, "Rejected drafts, by position"), make("ol", { start: String(position) }, ...drafts));
    }
    this.element.hidden = false;
    this.anchor = beside;
    this.place();
  }
  hide() {
    this.element.hidden = true;
    this.anchor = null;
  }
  place() {
    const [anchor] = this.anchor?.getClientRects() ?? [];
    if (!anchor) return;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const edge = 8;
    const left = Math.max(edge, Math.min(anchor.left, document.documentElement.clientWidth - width - edge));
    const isAbove = anchor.top - height - edge > 0;
    const top = isAbove ? anchor.top - height - edge : anchor.bottom + edge;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  }
};

// src/main.ts
var LOOK_AGAIN_MS = 2e3;
var Page = class {
  api = new Api();
  about = new AboutServer();
  card = new TokenCard();
  status = byId("status", HTMLParagraphElement);
  server = byId("server", HTMLParagraphElement);
  spoken = byId("spoken", HTMLParagraphElement);
  conversation = byId("conversation", HTMLElement);
  welcome = byId("welcome", HTMLElement);
  form = byId("composer", HTMLFormElement);
  prompt = byId("prompt", HTMLTextAreaElement);
  speculation = byId("speculation", HTMLInputElement);
  compare = byId("compare", HTMLInputElement);
  temperature = byId("temperature", HTMLInputElement);
  maxTokens = byId("max-tokens", HTMLInputElement);
  send = byId("send", HTMLButtonElement);
  stop = byId("stop", HTMLButtonElement);
  restart = byId("restart", HTMLButtonElement);
  keyDialog = byId("key-dialog", HTMLDialogElement);
  key = byId("key", HTMLInputElement);
  keyError = byId("key-error", HTMLParagraphElement);
  info = null;
  messages = [];
  running = null;
  /** The end of the answer is kept in sight, until somebody scrolls. */
  follows = true;
  start() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      void this.submit();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    for (const name of ["wheel", "touchmove"]) {
      document.addEventListener(name, () => this.follows = false, { passive: true });
    }
    this.restart.addEventListener("click", () => this.forget());
    this.compare.addEventListener("change", () => this.showState());
    for (const button of this.welcome.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        this.prompt.value = button.textContent ?? "";
        void this.submit();
      });
    }
    byId("key-form", HTMLFormElement).addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.key = this.key.value.trim();
      this.key.value = "";
      this.keyDialog.close();
      void this.meet();
    });
    this.showState();
    void this.meet();
  }
  // ---- the server --------------------------------------------------------------------------
  /** Ask the server what it is; again and again until it answers. */
  async meet() {
    try {
      this.info = await this.api.info();
    } catch (error) {
      this.info = null;
      this.showState();
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) {
        this.setStatus("waiting", "an API key is needed");
        this.keyError.hidden = this.api.key === null;
        if (!this.keyDialog.open) this.keyDialog.showModal();
        return;
      }
      this.setStatus(error.status === 503 ? "waiting" : "down", error.message);
      setTimeout(() => void this.meet(), LOOK_AGAIN_MS);
      return;
    }
    const { model, drafter, num_speculative_tokens: numDrafts } = this.info;
    const [method] = (drafter ?? "").split(",");
    this.server.textContent = method ? `${model} · drafter ${method}, K = ${numDrafts}` : `${model} · no drafter`;
    this.server.title = drafter ?? "";
    this.setStatus("ready", "ready");
    this.about.show(this.info);
    this.showState();
  }
  setStatus(kind, text) {
    this.status.className = `status ${kind}`;
    this.status.textContent = text;
  }
  showState() {
    const isBusy = this.running !== null;
    const focused = document.activeElement;
    this.send.disabled = isBusy || this.info === null;
    this.send.hidden = isBusy;
    this.stop.hidden = !isBusy;
    this.restart.disabled = isBusy || !this.messages.length;
    const drafts = (this.info?.num_speculative_tokens ?? 1) > 0;
    if (!drafts) this.speculation.checked = this.compare.checked = false;
    this.compare.disabled = !drafts;
    this.speculation.disabled = this.compare.checked || !drafts;
    this.welcome.hidden = this.conversation.childElementCount > 0;
    for (const button of this.welcome.querySelectorAll("button")) button.disabled = this.send.disabled;
    if (focused === this.send && isBusy) this.stop.focus();
    else if (focused === this.stop && !isBusy || this.welcome.hidden && this.welcome.contains(focused)) this.prompt.focus();
  }
  // ---- the conversation --------------------------------------------------------------------
  async submit() {
    const text = this.prompt.value.trim();
    if (!text || this.send.disabled || !this.form.reportValidity()) return;
    this.prompt.value = "";
    await this.ask(text);
  }
  forget() {
    this.messages = [];
    this.conversation.replaceChildren();
    this.showState();
    this.prompt.focus();
  }
  /** One turn: the prompt, and one answer, or two of which the second is made without speculation. */
  async ask(text) {
    const { info } = this;
    if (!info) return;
    const messages = [...this.messages, { role: "user", content: text }];
    const both = this.compare.checked && !this.compare.disabled;
    const ways = both ? [true, false] : [this.speculation.checked && info.num_speculative_tokens > 0];
    const answers = ways.map((speculation) => this.makeAnswer(info, speculation, both));
    const turn = make("section", { class: "turn", "aria-label": "Turn" });
    const pair = make("div", { class: both ? "answers pair" : "answers" }, ...answers.map((answer) => answer.element));
    turn.append(make("p", { class: "prompt" }, text), pair);
    this.conversation.append(turn);
    this.messages = messages;
    this.running = new AbortController();
    this.showState();
    this.follows = true;
    turn.scrollIntoView({ block: "nearest" });
    let isComplete = true;
    for (const [place, answer] of answers.entries()) {
      const options = this.options(ways[place] ?? true);
      isComplete = isComplete && await this.run(answer, messages, options, () => this.again(turn, text));
      if (!isComplete) answer.element.classList.add("incomplete");
    }
    const said = answers[0]?.content ?? "";
    this.messages = said ? [...messages, { role: "assistant", content: said }] : messages.slice(0, -1);
    const [fast, slow] = answers;
    if (isComplete && fast && slow) turn.append(verdict(fast, slow));
    this.follow(turn);
    this.running = null;
    this.showState();
    await this.meet();
  }
  /** Throw a failed turn away and ask once more. */
  again(turn, text) {
    if (this.running || !this.info) return;
    turn.remove();
    const at = this.messages.findLastIndex((message) => message.role === "user" && message.content === text);
    if (at >= 0 && at >= this.messages.length - 2) this.messages = this.messages.slice(0, at);
    void this.ask(text);
  }
  options(speculation) {
    return { speculation, temperature: this.temperature.valueAsNumber, maxTokens: this.maxTokens.valueAsNumber };
  }
  makeAnswer(info, speculation, isOneOfTwo) {
    const drafts = speculation ? info.num_speculative_tokens : 0;
    const heading = speculation ? "With speculation" : "Without speculation";
    const announce = (text) => void (this.spoken.textContent = text);
    return new Answer({ numDrafts: drafts, heading: isOneOfTwo ? heading : `Answer ${heading.toLowerCase()}`, card: this.card, announce });
  }
  /** Let one answer come. False if it did not come whole. */
  async run(answer, messages, options, again) {
    const signal = this.running?.signal;
    if (!signal || signal.aborted) {
      answer.end("stopped");
      return false;
    }
    let reason = "stop";
    answer.begin(performance.now());
    try {
      for await (const event of this.api.chat(messages, options, signal)) {
        if (event.kind === "tokens") {
          answer.add(event.tokens, performance.now());
          this.follow(answer.element);
        } else if (event.kind === "finished") reason = event.reason;
        else answer.measure(event.metrics);
      }
    } catch (error) {
      if (signal.aborted) {
        answer.end("stopped");
      } else {
        answer.fail(this.explain(error), again);
      }
      this.spoken.textContent = signal.aborted ? "Stopped." : "";
      return false;
    }
    answer.end(reason);
    this.spoken.textContent = spoken(answer);
    return true;
  }
  follow(element) {
    if (this.follows) element.lastElementChild?.scrollIntoView({ block: "nearest" });
  }
  explain(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 429) return sentence(error.message);
    return `The server is busy: ${error.message}.` + (error.retryAfter ? ` It asks to wait ${error.retryAfter} s.` : "");
  }
};
function spoken(answer) {
  const { tally } = answer;
  const speed = tally.tokensPerSecond === null ? "" : `, ${tally.tokensPerSecond.toFixed(1)} tokens per second`;
  const length = tally.acceptanceLength === null ? "" : `, acceptance length ${tally.acceptanceLength.toFixed(2)}`;
  return `${answer.content} — ${tally.numTokens} tokens${speed}${length}.`;
}
function verdict(fast, slow) {
  const [a, b] = [fast.tally.tokensPerSecond, slow.tally.tokensPerSecond];
  const ratio = a && b ? `${(a / b).toFixed(2)}× as fast with speculation` : "Too short to compare";
  const same = fast.content === slow.content ? "the text is the same" : "the texts differ, as drawn texts do";
  return make("p", { class: "verdict" }, `${ratio}; ${same}.`);
}
new Page().start();
