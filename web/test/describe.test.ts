import assert from "node:assert/strict";
import { test } from "node:test";
import { describeAloud, number, sentence, visible } from "../src/describe.js";

test("white space at the ends of a token can be seen", () => {
  assert.equal(visible(" the"), "“␣the”");
  assert.equal(visible("\n\n"), "“↵↵”");
  assert.equal(visible(""), "(no text of its own)");
});

test("a screen reader hears which drafts were rejected", () => {
  const rejected = [" cat", " sat"].map((text) => ({ token_id: 1, text }));
  const said = describeAloud({ token_id: 2, text: " dog", source: "replacement", rejected }, 3);
  assert.match(said, /^“␣dog”, replacement.*Rejected: “␣cat”, “␣sat”$/);
  const draft = describeAloud({ token_id: 2, text: "x", source: "draft", position: 2 }, 3);
  assert.equal(draft, "“x”, accepted draft, position 2 of 3");
});

test("what is not known is a dash", () => {
  assert.equal(number(null, 1), "–");
  assert.equal(number(1.25, 1, " s"), "1.3 s");
});

test("what a server says becomes a sentence", () => {
  assert.deepEqual(["it is dead", "Gone."].map(sentence), ["It is dead.", "Gone."]);
});
