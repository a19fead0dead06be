import { coverageSummary, coverageTables, type CoverageTable, type PhaseCoverage } from "./coverage.js";
import { byId, make } from "./dom.js";
import type { GraphReport, GraphRow, LoopRow, ServerInfo } from "./protocol.js";

const MODES: Record<string, string> = { FULL: "full", PIECEWISE: "pieces", NONE: "eager" };

/** The coverage table and the settings. */
export class AboutServer {
  private readonly summary = byId("coverage-summary", HTMLSpanElement);
  private readonly tables = byId("coverage-tables", HTMLDivElement);
  private readonly onlyRun = byId("only-run", HTMLInputElement);
  private readonly settings = byId("settings", HTMLDivElement);
  private report: GraphReport | null = null;

  constructor() {
    this.onlyRun.addEventListener("change", () => this.draw());
  }

  show(info: ServerInfo): void {
    this.report = info.graphs;
    this.draw();
    const head = make("tr", {}, ...["Setting", "Value", "Why"].map((name) => make("th", { scope: "col" }, name)));
    const rows = info.settings.map(({ name, value, reason }) =>
      make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value), make("td", {}, reason)),
    );
    this.settings.replaceChildren(scrolling("Settings", make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  }

  private draw(): void {
    if (!this.report) return;
    this.summary.textContent = coverageSummary(this.report);
    const tables = coverageTables(this.report).map((table) => this.table(table));
    this.tables.replaceChildren(...tables.filter((table) => table !== null), ...loops(this.report.loops));
    if (!this.tables.childElementCount) this.tables.append(make("p", { class: "note" }, "Nothing has run yet."));
  }

  private table({ unit, sizes, phases }: CoverageTable): HTMLElement | null {
    const shown = phases.filter((phase) => !this.onlyRun.checked || phase.replays || phase.eagerRuns);
    if (!shown.length) return null;
    const what = unit === "rows" ? "Decoding: phase by number of rows" : "Prompts: phase by number of tokens";
    const columns = ["replays", "eager", ...sizes.map(String)];
    const head = make("tr", {}, make("th", { scope: "col" }, "Phase"), ...columns.map((name) => make("th", { scope: "col" }, name)));
    const table = make("table", { class: "coverage" }, make("caption", {}, what), make("thead", {}, head));
    table.append(make("tbody", {}, ...shown.map((phase) => phaseRow(phase, sizes))));
    return scrolling(what, table);
  }
}

function phaseRow(phase: PhaseCoverage, sizes: number[]): HTMLElement {
  const name = make("th", { scope: "row" }, phase.name, phase.reason ? make("small", {}, phase.reason) : null);
  const cells = sizes.map((size) => cell(phase.cells.get(size)));
  const counts = [phase.replays, phase.eagerRuns].map((count) => make("td", { class: "count" }, count.toLocaleString("en")));
  if (phase.eagerRuns) counts[1]?.classList.add("eager-runs");
  return make("tr", {}, name, ...counts, ...cells);
}

function cell(row: GraphRow | undefined): HTMLElement {
  if (!row) return make("td", { class: "cell" }, "·");
  const mode = row.captured ? row.mode : "NONE";
  const runs = row.replays + row.eager_runs;
  const time = row.ms === null ? null : `${row.ms.toFixed(2)} ms`;
  const hint = [row.reason, time, `${row.replays} replays, ${row.eager_runs} eager runs`].filter(Boolean).join("; ");
  const classes = ["cell", mode.toLowerCase(), runs ? "used" : ""].join(" ").trim();
  return make("td", { class: classes, title: hint }, MODES[mode] ?? mode.toLowerCase());
}

function loops(rows: LoopRow[]): HTMLElement[] {
  if (!rows.length) return [];
  const iterations = rows.reduce((sum, row) => sum + row.iterations, 0);
  const launches = rows.reduce((sum, row) => sum + row.launches, 0);
  const text = `Device loop: ${iterations.toLocaleString("en")} iterations in ${launches.toLocaleString("en")} launches.`;
  return [make("p", {}, text)];
}

/** What is wider than the screen scrolls by itself, also with the keyboard. */
function scrolling(name: string, table: HTMLElement): HTMLElement {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
}
