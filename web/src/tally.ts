import type { Metrics, Token } from "./protocol.js";

/** What is known of an answer so far, counted from the sources of its tokens. */
export class Tally {
  numTokens = 0;
  /** Steps for which something was drafted. */
  numSteps = 0;
  numAccepted = 0;
  /** Steps that accepted the draft at position 1, 2, .. */
  readonly acceptedAt: number[];
  private firstAt = 0;
  private lastAt = 0;
  private insideStep = false;
  private measured: Metrics | null = null;

  /** `numDrafts` is K: how many drafts a step can have; `askedAt` is in milliseconds, as all times are. */
  constructor(
    numDrafts: number,
    private readonly askedAt: number,
  ) {
    this.acceptedAt = new Array<number>(numDrafts).fill(0);
  }

  /** Count tokens that came at `now`. */
  add(tokens: readonly Token[], now: number): void {
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
  end(metrics: Metrics): void {
    this.measured = metrics;
  }

  get tokensPerSecond(): number | null {
    if (this.measured) return this.measured.tokens_per_second ?? null;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.numTokens - 1) / seconds : null;
  }

  get firstTokenSeconds(): number | null {
    if (this.measured) return this.measured.time_to_first_token_ms / 1000;
    return this.numTokens ? (this.firstAt - this.askedAt) / 1000 : null;
  }

  /** Tokens of a drafted step, on average; null before there is one. */
  get acceptanceLength(): number | null {
    return this.numSteps ? 1 + this.numAccepted / this.numSteps : null;
  }

  /** Share of drafted steps that accepted the draft at each position. */
  get shares(): number[] {
    return this.acceptedAt.map((count) => (this.numSteps ? count / this.numSteps : 0));
  }
}
