/** Takes server-sent events apart, however the network has cut them. */
export class EventParser {
  private rest = "";

  /** The data of every event that this piece completes. */
  feed(piece: string): string[] {
    const blocks = (this.rest + piece).replaceAll("\r\n", "\n").split("\n\n");
    this.rest = blocks.pop() ?? "";
    return blocks.map(dataOf).filter((data) => data !== null);
  }
}

function dataOf(block: string): string | null {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(line.startsWith("data: ") ? 6 : 5)).join("\n") : null;
}
