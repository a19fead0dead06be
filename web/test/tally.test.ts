import assert from "node:assert/strict";
import { test } from "node:test";
import type { Token } from "../src/protocol.js";
import { Tally } from "../src/tally.js";

/** One letter a token: p(lain), b(onus), r(eplacement), or the position of a draft. */
function tokens(kinds: string): Token[] {
  return [...kinds].map((kind): Token => {
    const named = { token_id: 1, text: kind };
    if (kind === "p" || kind === "b") return { ...named, source: kind === "p" ? "plain" : "bonus" };
    if (kind === "r") return { ...named, source: "replacement", rejected: [named] };
    return { ...named, source: "draft", position: Number(kind) };
  });
}

test("steps, acceptance and speed follow from the tokens", () => {
  const tally = new Tally(3, 1000);
  assert.deepEqual([tally.tokensPerSecond, tally.acceptanceLength, tally.firstTokenSeconds], [null, null, null]);
  tally.add(tokens("p"), 1500);
  assert.equal(tally.firstTokenSeconds, 0.5);
  tally.add(tokens("12r"), 2000); // 2 of 3
  tally.add(tokens("r"), 2500); // none
  tally.add(tokens("123b1"), 3500); // all, and the beginning of a step that the stream has cut
  tally.add(tokens("2r"), 4500);
  assert.equal(tally.numTokens, 12);
  assert.equal(tally.numSteps, 4);
  assert.deepEqual(tally.acceptedAt, [3, 3, 1]);
  assert.equal(tally.acceptanceLength, 1 + 7 / 4);
  assert.deepEqual(tally.shares, [3 / 4, 3 / 4, 1 / 4]);
  assert.equal(tally.tokensPerSecond, 11 / 3);
});

test("a step that the length limit cuts is a step", () => {
  const tally = new Tally(3, 0);
  tally.add(tokens("pr12"), 1);
  assert.equal(tally.numSteps, 2);
});

test("what the server measured replaces what was measured here", () => {
  const tally = new Tally(0, 0);
  tally.add(tokens("p"), 3000);
  tally.add(tokens("ppp"), 5000);
  tally.end({ time_to_first_token_ms: 250, generation_time_ms: 900, tokens_per_second: 40 });
  assert.deepEqual([tally.firstTokenSeconds, tally.tokensPerSecond, tally.acceptanceLength], [0.25, 40, null]);
});
