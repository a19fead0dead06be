import { AcceptanceChart, depth } from "./chart.js";
import { describeAloud, number } from "./describe.js";
import { make } from "./dom.js";
import type { Metrics, Token } from "./protocol.js";
import { Tally } from "./tally.js";
import type { TokenCard } from "./token_card.js";

const ENDINGS: Record<string, string> = {
  length: "Ended at the length limit.",
  stopped: "Stopped.",
};

export interface AnswerOptions {
  /** K, or 0 for an answer without speculation. */
  numDrafts: number;
  heading: string;
  card: TokenCard;
  /** Tells screen readers. */
  announce: (text: string) => void;
}

/** One answer: its tokens, coloured by where they came from, and its numbers. */
export class Answer {
  readonly element: HTMLElement;
  tally: Tally;
  private readonly tokens: { token: Token; span: HTMLElement }[] = [];
  private readonly text: HTMLElement;
  private readonly note = make("p", { class: "note", hidden: "" });
  private readonly numbers = make("dl", { class: "numbers" });
  private readonly chart: AcceptanceChart | null;
  private current = -1;

  constructor(private readonly options: AnswerOptions) {
    const { numDrafts, heading } = options;
    this.tally = new Tally(numDrafts, 0);
    this.text = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Answer" });
    this.chart = numDrafts ? new AcceptanceChart(numDrafts) : null;
    const figure = this.chart
      ? make("figure", {}, this.chart.element, make("figcaption", {}, "Share of steps that accepted the draft at each position"))
      : null;
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

  get content(): string {
    return this.tokens.map(({ token }) => token.text).join("");
  }

  /** It has been asked for. */
  begin(now: number): void {
    this.tally = new Tally(this.options.numDrafts, now);
  }

  add(tokens: readonly Token[], now: number): void {
    this.tally.add(tokens, now);
    for (const token of tokens) {
      const span = make("span", { class: `token ${token.source}` }, token.text);
      if (token.source === "draft") span.style.setProperty("--depth", depth(token.position, this.options.numDrafts));
      this.tokens.push({ token, span });
      this.text.append(span);
    }
    this.update();
  }

  measure(metrics: Metrics): void {
    this.tally.end(metrics);
    this.update();
  }

  /** Nothing more will come. `reason` is the server's, or "stopped". */
  end(reason: string): void {
    this.element.setAttribute("aria-busy", "false");
    this.say(ENDINGS[reason] ?? "");
    const label = `Answer of ${this.tokens.length} tokens; the arrow keys step through them`;
    this.text.setAttribute("aria-label", label);
    this.update();
  }

  /** It ended in an error, which `again` can try to undo. */
  fail(message: string, again: (() => void) | null): void {
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

  private say(text: string): void {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  private update(): void {
    const { tally } = this;
    const facts: [string, string][] = [
      ["Tokens per second", number(tally.tokensPerSecond, 1)],
      ["Tokens", String(tally.numTokens)],
      ["First token after", number(tally.firstTokenSeconds, 2, " s")],
    ];
    if (this.chart) {
      this.chart.show(tally.shares);
      facts.splice(1, 0, ["Acceptance length", number(tally.acceptanceLength, 2)]);
    }
    const terms = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.numbers.replaceChildren(...terms);
  }

  // ---- looking at a token ------------------------------------------------------------------

  private onKey(event: KeyboardEvent): void {
    const last = this.tokens.length - 1;
    const places: Record<string, number> = {
      ArrowRight: Math.min(this.current + 1, last),
      ArrowLeft: Math.max(this.current - 1, 0),
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") this.leave();
    const place = places[event.key];
    if (place === undefined || last < 0) return;
    event.preventDefault();
    this.look(place);
    const found = this.tokens[place];
    if (found) this.options.announce(describeAloud(found.token, this.options.numDrafts));
  }

  private onPointer(event: Event): void {
    const place = this.tokens.findIndex(({ span }) => span === event.target);
    if (place >= 0) this.look(place);
  }

  private look(place: number): void {
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

  private leave(): void {
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = -1;
    this.options.card.hide();
  }
}
