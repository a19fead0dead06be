import { Answer } from "./answer.js";
import { Api, ApiError, type ChatOptions } from "./api.js";
import { AboutServer } from "./coverage_view.js";
import { sentence } from "./describe.js";
import { byId, make } from "./dom.js";
import type { Message, ServerInfo } from "./protocol.js";
import { TokenCard } from "./token_card.js";

const LOOK_AGAIN_MS = 2000;

class Page {
  private readonly api = new Api();
  private readonly about = new AboutServer();
  private readonly card = new TokenCard();
  private readonly status = byId("status", HTMLParagraphElement);
  private readonly server = byId("server", HTMLParagraphElement);
  private readonly spoken = byId("spoken", HTMLParagraphElement);
  private readonly conversation = byId("conversation", HTMLElement);
  private readonly welcome = byId("welcome", HTMLElement);
  private readonly form = byId("composer", HTMLFormElement);
  private readonly prompt = byId("prompt", HTMLTextAreaElement);
  private readonly speculation = byId("speculation", HTMLInputElement);
  private readonly compare = byId("compare", HTMLInputElement);
  private readonly temperature = byId("temperature", HTMLInputElement);
  private readonly maxTokens = byId("max-tokens", HTMLInputElement);
  private readonly send = byId("send", HTMLButtonElement);
  private readonly stop = byId("stop", HTMLButtonElement);
  private readonly restart = byId("restart", HTMLButtonElement);
  private readonly keyDialog = byId("key-dialog", HTMLDialogElement);
  private readonly key = byId("key", HTMLInputElement);
  private readonly keyError = byId("key-error", HTMLParagraphElement);

  private info: ServerInfo | null = null;
  private messages: Message[] = [];
  private running: AbortController | null = null;
  /** The end of the answer is kept in sight, until somebody scrolls. */
  private follows = true;

  start(): void {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      void this.submit();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    for (const name of ["wheel", "touchmove"] as const) {
      document.addEventListener(name, () => (this.follows = false), { passive: true });
    }
    this.restart.addEventListener("click", () => this.forget());
    this.compare.addEventListener("change", () => this.showState());
    for (const button of this.welcome.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        this.prompt.value = button.textContent ?? "";
        void this.submit();
      });
    }
    byId("key-form", HTMLFormElement).addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.key = this.key.value.trim();
      this.key.value = "";
      this.keyDialog.close();
      void this.meet();
    });
    this.showState();
    void this.meet();
  }

  // ---- the server --------------------------------------------------------------------------

  /** Ask the server what it is; again and again until it answers. */
  private async meet(): Promise<void> {
    try {
      this.info = await this.api.info();
    } catch (error) {
      this.info = null;
      this.showState();
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) {
        this.setStatus("waiting", "an API key is needed");
        this.keyError.hidden = this.api.key === null;
        if (!this.keyDialog.open) this.keyDialog.showModal();
        return;
      }
      this.setStatus(error.status === 503 ? "waiting" : "down", error.message);
      setTimeout(() => void this.meet(), LOOK_AGAIN_MS);
      return;
    }
    const { model, drafter, num_speculative_tokens: numDrafts } = this.info;
    const [method] = (drafter ?? "").split(",");
    this.server.textContent = method ? `${model} · drafter ${method}, K = ${numDrafts}` : `${model} · no drafter`;
    this.server.title = drafter ?? "";
    this.setStatus("ready", "ready");
    this.about.show(this.info);
    this.showState();
  }

  private setStatus(kind: "ready" | "waiting" | "down", text: string): void {
    this.status.className = `status ${kind}`;
    this.status.textContent = text;
  }

  private showState(): void {
    const isBusy = this.running !== null;
    const focused = document.activeElement;
    this.send.disabled = isBusy || this.info === null;
    this.send.hidden = isBusy;
    this.stop.hidden = !isBusy;
    this.restart.disabled = isBusy || !this.messages.length;
    const drafts = (this.info?.num_speculative_tokens ?? 1) > 0;
    if (!drafts) this.speculation.checked = this.compare.checked = false;
    this.compare.disabled = !drafts;
    this.speculation.disabled = this.compare.checked || !drafts;
    this.welcome.hidden = this.conversation.childElementCount > 0;
    for (const button of this.welcome.querySelectorAll("button")) button.disabled = this.send.disabled;
    // whoever pressed a button that is gone now goes on beside it
    if (focused === this.send && isBusy) this.stop.focus();
    else if ((focused === this.stop && !isBusy) || (this.welcome.hidden && this.welcome.contains(focused))) this.prompt.focus();
  }

  // ---- the conversation --------------------------------------------------------------------

  private async submit(): Promise<void> {
    const text = this.prompt.value.trim();
    if (!text || this.send.disabled || !this.form.reportValidity()) return;
    this.prompt.value = "";
    await this.ask(text);
  }

  private forget(): void {
    this.messages = [];
    this.conversation.replaceChildren();
    this.showState();
    this.prompt.focus();
  }

  /** One turn: the prompt, and one answer, or two of which the second is made without speculation. */
  private async ask(text: string): Promise<void> {
    const { info } = this;
    if (!info) return;
    const messages: Message[] = [...this.messages, { role: "user", content: text }];
    const both = this.compare.checked && !this.compare.disabled;
    const ways = both ? [true, false] : [this.speculation.checked && info.num_speculative_tokens > 0];
    const answers = ways.map((speculation) => this.makeAnswer(info, speculation, both));
    const turn = make("section", { class: "turn", "aria-label": "Turn" });
    const pair = make("div", { class: both ? "answers pair" : "answers" }, ...answers.map((answer) => answer.element));
    turn.append(make("p", { class: "prompt" }, text), pair);
    this.conversation.append(turn);
    this.messages = messages;
    this.running = new AbortController();
    this.showState();
    this.follows = true;
    turn.scrollIntoView({ block: "nearest" });
    let isComplete = true;
    // one after the other, so that each has the machine to itself
    for (const [place, answer] of answers.entries()) {
      const options = this.options(ways[place] ?? true);
      isComplete = isComplete && (await this.run(answer, messages, options, () => this.again(turn, text)));
      if (!isComplete) answer.element.classList.add("incomplete");
    }
    const said = answers[0]?.content ?? "";
    this.messages = said ? [...messages, { role: "assistant", content: said }] : messages.slice(0, -1);
    const [fast, slow] = answers;
    if (isComplete && fast && slow) turn.append(verdict(fast, slow));
    this.follow(turn);
    this.running = null;
    this.showState();
    await this.meet();
  }

  /** Throw a failed turn away and ask once more. */
  private again(turn: HTMLElement, text: string): void {
    if (this.running || !this.info) return;
    turn.remove();
    const at = this.messages.findLastIndex((message) => message.role === "user" && message.content === text);
    if (at >= 0 && at >= this.messages.length - 2) this.messages = this.messages.slice(0, at);
    void this.ask(text);
  }

  private options(speculation: boolean): ChatOptions {
    return { speculation, temperature: this.temperature.valueAsNumber, maxTokens: this.maxTokens.valueAsNumber };
  }

  private makeAnswer(info: ServerInfo, speculation: boolean, isOneOfTwo: boolean): Answer {
    const drafts = speculation ? info.num_speculative_tokens : 0;
    const heading = speculation ? "With speculation" : "Without speculation";
    const announce = (text: string): void => void (this.spoken.textContent = text);
    return new Answer({ numDrafts: drafts, heading: isOneOfTwo ? heading : `Answer ${heading.toLowerCase()}`, card: this.card, announce });
  }

  /** Let one answer come. False if it did not come whole. */
  private async run(answer: Answer, messages: Message[], options: ChatOptions, again: () => void): Promise<boolean> {
    const signal = this.running?.signal;
    if (!signal || signal.aborted) {
      answer.end("stopped");
      return false;
    }
    let reason = "stop";
    answer.begin(performance.now());
    try {
      for await (const event of this.api.chat(messages, options, signal)) {
        if (event.kind === "tokens") {
          answer.add(event.tokens, performance.now());
          this.follow(answer.element);
        } else if (event.kind === "finished") reason = event.reason;
        else answer.measure(event.metrics);
      }
    } catch (error) {
      if (signal.aborted) {
        answer.end("stopped");
      } else {
        answer.fail(this.explain(error), again);
      }
      this.spoken.textContent = signal.aborted ? "Stopped." : "";
      return false;
    }
    answer.end(reason);
    this.spoken.textContent = spoken(answer);
    return true;
  }

  private follow(element: HTMLElement): void {
    if (this.follows) element.lastElementChild?.scrollIntoView({ block: "nearest" });
  }

  private explain(error: unknown): string {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 429) return sentence(error.message);
    return `The server is busy: ${error.message}.` + (error.retryAfter ? ` It asks to wait ${error.retryAfter} s.` : "");
  }
}

function spoken(answer: Answer): string {
  const { tally } = answer;
  const speed = tally.tokensPerSecond === null ? "" : `, ${tally.tokensPerSecond.toFixed(1)} tokens per second`;
  const length = tally.acceptanceLength === null ? "" : `, acceptance length ${tally.acceptanceLength.toFixed(2)}`;
  return `${answer.content} — ${tally.numTokens} tokens${speed}${length}.`;
}

/** Which of the two was faster, and whether they say the same. */
function verdict(fast: Answer, slow: Answer): HTMLElement {
  const [a, b] = [fast.tally.tokensPerSecond, slow.tally.tokensPerSecond];
  const ratio = a && b ? `${(a / b).toFixed(2)}× as fast with speculation` : "Too short to compare";
  const same = fast.content === slow.content ? "the text is the same" : "the texts differ, as drawn texts do";
  return make("p", { class: "verdict" }, `${ratio}; ${same}.`);
}

new Page().start();
