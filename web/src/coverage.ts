import type { GraphReport, GraphRow } from "./protocol.js";

export interface PhaseCoverage {
  name: string;
  mode: string;
  /** Why it is not the mode that was asked for; empty where it is. */
  reason: string;
  /** By size. */
  cells: Map<number, GraphRow>;
  replays: number;
  eagerRuns: number;
}

/** Phases whose sizes are counted alike. */
export interface CoverageTable {
  unit: "rows" | "tokens";
  sizes: number[];
  phases: PhaseCoverage[];
}

/** The report as tables of phase x size: decoding phases by rows, phases of prompts by tokens. */
export function coverageTables(report: GraphReport): CoverageTable[] {
  const byPhase = new Map<string, GraphRow[]>();
  for (const row of report.rows) byPhase.set(row.phase, [...(byPhase.get(row.phase) ?? []), row]);
  const tables: CoverageTable[] = [
    { unit: "rows", sizes: [], phases: [] },
    { unit: "tokens", sizes: [], phases: [] },
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

function phaseCoverage(name: string, rows: GraphRow[], unit: "rows" | "tokens"): PhaseCoverage {
  return {
    name,
    mode: rows[0]?.mode ?? "NONE",
    reason: rows.map((row) => row.reason).find((reason) => reason) ?? "",
    cells: new Map(rows.map((row) => [row[unit], row])),
    replays: rows.reduce((sum, row) => sum + row.replays, 0),
    eagerRuns: rows.reduce((sum, row) => sum + row.eager_runs, 0),
  };
}

/** One sentence about everything that ran. */
export function coverageSummary(report: GraphReport): string {
  const replays = report.rows.reduce((sum, row) => sum + row.replays, 0);
  const eager = report.rows.reduce((sum, row) => sum + row.eager_runs, 0);
  if (!replays && !eager) return `${report.cudagraph_mode}; nothing has run yet`;
  return `${report.cudagraph_mode}; ${count(replays, "replay")}, ${count(eager, "eager run")}`;
}

function count(number: number, noun: string): string {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}
