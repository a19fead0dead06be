import type { Chunk, Message, Metrics, ServerInfo, Token } from "./protocol.js";
import { EventParser } from "./sse.js";

/** An answer other than 200; status 0: none at all. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** Seconds that the server asks to wait. */
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

export interface ChatOptions {
  speculation: boolean;
  temperature: number;
  maxTokens: number;
}

export type ChatEvent =
  | { kind: "tokens"; tokens: Token[] }
  | { kind: "finished"; reason: string }
  | { kind: "metrics"; metrics: Metrics };

const KEY = "draftloop-api-key";

/** The server that this page came from. A key is kept for as long as the tab is open. */
export class Api {
  get key(): string | null {
    return sessionStorage.getItem(KEY);
  }

  set key(key: string) {
    sessionStorage.setItem(KEY, key);
  }

  /** Raises ApiError. */
  async info(): Promise<ServerInfo> {
    return (await (await this.fetch("server_info")).json()) as ServerInfo;
  }

  /** What an answer is made of, as it comes. Raises ApiError; aborting raises an AbortError. */
  async *chat(messages: Message[], options: ChatOptions, signal: AbortSignal): AsyncGenerator<ChatEvent> {
    const body = {
      messages,
      temperature: options.temperature,
      max_tokens: options.maxTokens,
      speculative: { enabled: options.speculation },
      stream: true,
      stream_options: { include_usage: true },
      return_token_sources: true,
    };
    const response = await this.fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    yield* readChat(response.body ?? new ReadableStream());
  }

  private async fetch(path: string, init: RequestInit = {}): Promise<Response> {
    const headers = new Headers(init.headers);
    if (this.key) headers.set("Authorization", `Bearer ${this.key}`);
    let response: Response;
    try {
      response = await fetch(path, { ...init, headers });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response: Response): Promise<ApiError> {
  const wait = Number(response.headers.get("Retry-After"));
  let message = `${response.status} ${response.statusText}`;
  try {
    message = ((await response.json()) as { error: { message: string } }).error.message;
  } catch {
    // a proxy's page, say
  }
  return new ApiError(response.status, message, wait > 0 ? wait : null);
}

/** The events of a streamed chat. Raises ApiError for an error in the stream, and for one that ends too soon. */
export async function* readChat(body: ReadableStream<Uint8Array>): AsyncGenerator<ChatEvent> {
  const parser = new EventParser();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      for (const data of parser.feed(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield* chatEvents(JSON.parse(data) as Chunk);
      }
    }
  } catch (error) {
    if (error instanceof ApiError || (error instanceof DOMException && error.name === "AbortError")) throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => undefined);
  }
  throw new ApiError(0, "The connection ended before the answer was complete.");
}

function* chatEvents(chunk: Chunk): Generator<ChatEvent> {
  if (chunk.error) throw new ApiError(500, chunk.error.message);
  for (const choice of chunk.choices) {
    if (choice.token_sources?.length) yield { kind: "tokens", tokens: choice.token_sources };
    if (choice.finish_reason) yield { kind: "finished", reason: choice.finish_reason };
  }
  if (chunk.metrics) yield { kind: "metrics", metrics: chunk.metrics };
}
