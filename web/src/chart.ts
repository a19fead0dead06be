import { draw } from "./dom.js";

const BAR = 34;
const GAP = 10;
const HEIGHT = 72;
const TOP = 16;
const BOTTOM = 18;

/** Draws the share of steps that accepted each position. The same drawing is kept up to date. */
export class AcceptanceChart {
  readonly element: SVGSVGElement;
  private readonly bars: { bar: SVGRectElement; label: SVGTextElement }[] = [];

  constructor(numDrafts: number) {
    const width = numDrafts * (BAR + GAP) + GAP;
    const height = TOP + HEIGHT + BOTTOM;
    this.element = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    for (let place = 0; place < numDrafts; place++) {
      const x = GAP + place * (BAR + GAP);
      const middle = x + BAR / 2;
      const all = draw("rect", { class: "all", x, width: BAR, y: TOP, height: HEIGHT });
      const bar = draw("rect", { class: "bar", x, width: BAR, y: TOP + HEIGHT, height: 0 });
      bar.style.setProperty("--depth", depth(place + 1, numDrafts));
      const label = draw("text", { class: "value", x: middle, y: TOP + HEIGHT - 4, "text-anchor": "middle" });
      const name = draw("text", { class: "name", x: middle, y: height - 4, "text-anchor": "middle" }, String(place + 1));
      this.element.append(all, bar, label, name);
      this.bars.push({ bar, label });
    }
    this.element.append(draw("line", { class: "axis", x1: 0, x2: width, y1: TOP + HEIGHT, y2: TOP + HEIGHT }));
    this.show(new Array<number>(numDrafts).fill(0));
  }

  show(shares: readonly number[]): void {
    this.bars.forEach(({ bar, label }, place) => {
      const share = shares[place] ?? 0;
      const height = Math.round(share * HEIGHT * 10) / 10;
      bar.setAttribute("y", String(TOP + HEIGHT - height));
      bar.setAttribute("height", String(height));
      label.setAttribute("y", String(TOP + HEIGHT - height - 4));
      label.textContent = percent(share);
    });
    const values = shares.map((share, place) => `position ${place + 1}: ${percent(share)}`).join(", ");
    this.element.setAttribute("aria-label", `Share of steps that accepted the draft at each position. ${values}`);
  }
}

export function percent(share: number): string {
  return `${Math.round(share * 100)}%`;
}

/** How deep the colour of a position is, from 0 for the first to 1 for the last. */
export function depth(position: number, numDrafts: number): string {
  return numDrafts > 1 ? ((position - 1) / (numDrafts - 1)).toFixed(3) : "0";
}
