import { byId, make } from "./dom.js";
import { describe, sentence, visible } from "./describe.js";
import type { Token } from "./protocol.js";

/** The small card beside a token that says where it came from. There is one on the page. */
export class TokenCard {
  private readonly element = byId("token-card", HTMLDivElement);
  private anchor: HTMLElement | null = null;

  constructor() {
    document.addEventListener("scroll", () => this.place(), { passive: true });
  }

  /** `position` is that of the first rejected draft. */
  show(token: Token, numDrafts: number, position: number, beside: HTMLElement): void {
    this.element.replaceChildren(
      make("p", { class: "token-text" }, visible(token.text)),
      make("p", {}, sentence(describe(token, numDrafts))),
    );
    if (token.source === "replacement") {
      const drafts = token.rejected.map((draft) => make("li", {}, make("s", {}, visible(draft.text))));
      this.element.append(make("p", { class: "caption" }, "Rejected drafts, by position"), make("ol", { start: String(position) }, ...drafts));
    }
    this.element.hidden = false;
    this.anchor = beside;
    this.place();
  }

  hide(): void {
    this.element.hidden = true;
    this.anchor = null;
  }

  private place(): void {
    // a token that is broken over two lines has several rectangles
    const [anchor] = this.anchor?.getClientRects() ?? [];
    if (!anchor) return;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const edge = 8;
    const left = Math.max(edge, Math.min(anchor.left, document.documentElement.clientWidth - width - edge));
    const isAbove = anchor.top - height - edge > 0;
    const top = isAbove ? anchor.top - height - edge : anchor.bottom + edge;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  }
}
