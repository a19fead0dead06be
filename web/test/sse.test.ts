import assert from "node:assert/strict";
import { test } from "node:test";
import { EventParser } from "../src/sse.js";

const STREAM = ': a comment\n\ndata: {"a": "ü"}\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n';
const EVENTS = ['{"a": "ü"}', "one\ntwo", "[DONE]"];

test("events are the same for every way of cutting the stream", () => {
  for (const text of [STREAM, STREAM.replaceAll("\n", "\r\n")]) {
    for (let size = 1; size <= text.length; size++) {
      const parser = new EventParser();
      const found: string[] = [];
      for (let at = 0; at < text.length; at += size) found.push(...parser.feed(text.slice(at, at + size)));
      assert.deepEqual(found, EVENTS, `pieces of ${size}`);
    }
  }
});

test("an event that has not ended is not handed out", () => {
  assert.deepEqual(new EventParser().feed("data: half"), []);
});
