import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, readChat, type ChatEvent } from "../src/api.js";

/** A body that comes in pieces of so many bytes. */
function body(text: string, size: number): ReadableStream<Uint8Array> {
  const bytes = new TextEncoder().encode(text);
  return new ReadableStream({
    start(controller) {
      for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
      controller.close();
    },
  });
}

async function all(text: string, size = 7): Promise<ChatEvent[]> {
  const found: ChatEvent[] = [];
  for await (const event of readChat(body(text, size))) found.push(event);
  return found;
}

const TOKENS = [{ token_id: 1, text: "né", source: "plain" }];
const CHUNKS = [
  { choices: [{ delta: { role: "assistant" }, finish_reason: null }] },
  { choices: [{ finish_reason: null, token_sources: TOKENS }] },
  { choices: [{ finish_reason: "stop", token_sources: [] }] },
  { choices: [], metrics: { time_to_first_token_ms: 5, generation_time_ms: 9 } },
];
const TEXT = CHUNKS.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("");

test("a stream is tokens, an end and metrics, also where it is cut inside a character", async () => {
  for (const size of [1, 2, 3, 7, 4096]) {
    assert.deepEqual(await all(`${TEXT}data: [DONE]\n\n`, size), [
      { kind: "tokens", tokens: TOKENS },
      { kind: "finished", reason: "stop" },
      { kind: "metrics", metrics: CHUNKS[3]?.metrics },
    ]);
  }
});

test("an error in the stream is raised with what the server says", async () => {
  const error = `data: ${JSON.stringify({ error: { message: "the engine has failed" } })}\n\n`;
  await assert.rejects(all(TEXT + error), (raised) => raised instanceof ApiError && raised.message === "the engine has failed");
});

test("a stream that ends too soon is an error", async () => {
  await assert.rejects(all(TEXT), (raised) => raised instanceof ApiError && /ended before/.test(raised.message));
});
