import assert from "node:assert/strict";
import { test } from "node:test";
import { coverageSummary, coverageTables } from "../src/coverage.js";
import type { GraphReport, GraphRow } from "../src/protocol.js";

function row(phase: string, rows: number, tokens: number, fields: Partial<GraphRow> = {}): GraphRow {
  const rest = { asked: "FULL", mode: "FULL", ragged: false, captured: true, reason: "", ms: null, replays: 0, eager_runs: 0 };
  return { phase, rows, tokens, ...rest, ...fields };
}

const REPORT: GraphReport = {
  cudagraph_mode: "FULL_AND_PIECEWISE",
  rows: [
    row("target.verify", 1, 4, { replays: 1200 }),
    row("target.verify", 8, 32),
    row("accept", 8, 32, { replays: 1 }),
    row("target.prefill", 4, 512, { ragged: true, mode: "PIECEWISE" }),
    row("target.prefill", 4, 64, { ragged: true, mode: "PIECEWISE" }),
    row("draft.prompt", 4, 512, { ragged: true, mode: "NONE", captured: false, reason: "why", eager_runs: 1 }),
  ],
  loops: [],
};

test("decoding phases are laid out by rows, those of prompts by tokens", () => {
  const [decoding, prompts, ...others] = coverageTables(REPORT);
  assert.deepEqual(others, []);
  assert.deepEqual([decoding?.unit, decoding?.sizes], ["rows", [1, 8]]);
  assert.deepEqual(decoding?.phases.map((phase) => phase.name), ["target.verify", "accept"]);
  assert.equal(decoding?.phases[1]?.cells.get(1), undefined, "a size that a phase does not have");
  assert.deepEqual([prompts?.unit, prompts?.sizes], ["tokens", [64, 512]]);
  const [, drafter] = prompts?.phases ?? [];
  assert.deepEqual([drafter?.mode, drafter?.reason, drafter?.eagerRuns], ["NONE", "why", 1]);
});

test("the summary counts what ran", () => {
  assert.equal(coverageSummary(REPORT), "FULL_AND_PIECEWISE; 1,201 replays, 1 eager run");
  assert.equal(coverageSummary({ ...REPORT, rows: [] }), "FULL_AND_PIECEWISE; nothing has run yet");
});
