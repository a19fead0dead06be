import type { Token } from "./protocol.js";

/** A token's text with white space that can be seen. */
export function visible(text: string): string {
  if (!text) return "(no text of its own)";
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣")}”`;
}

/** Where a token came from, in a sentence. `numDrafts` is K. */
export function describe(token: Token, numDrafts: number): string {
  switch (token.source) {
    case "draft":
      return `accepted draft, position ${token.position} of ${numDrafts}`;
    case "bonus":
      return "bonus token: the model's own, after all drafts of the step were accepted";
    case "replacement":
      return "replacement: the model's own token, instead of the first rejected draft";
    case "plain":
      return "plain: the model's own token, where nothing was drafted";
  }
}

/** All that the page knows of a token, for screen readers. */
export function describeAloud(token: Token, numDrafts: number): string {
  const said = `${visible(token.text)}, ${describe(token, numDrafts)}`;
  if (token.source !== "replacement") return said;
  return `${said}. Rejected: ${token.rejected.map((draft) => visible(draft.text)).join(", ")}`;
}

/** With a capital and a full stop. */
export function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** Such as "31.4 tokens/s"; a dash where nothing is known yet. */
export function number(value: number | null, digits: number, unit = ""): string {
  return value === null ? "–" : value.toFixed(digits) + unit;
}
