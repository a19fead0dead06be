#!/usr/bin/env python3
"""Draws docs/pictures from what ran: `make pictures`.

answers.svg    an answer of the embedded model with its shipped drafter and without, step by step; a step takes what it
               took where docs/numbers was measured, whatever else this machine does now
page-*.png     the server's page at that answer, in Chromium
iteration.svg  one EAGLE-3 iteration on an H200, from the newest file in docs/numbers
"""

from __future__ import annotations

import argparse
import html
import http.client
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftloop.bench.goals import GOALS
from draftloop.bench.report import best_row, newest_rows, read_runs

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
PORT = 8017
MODEL, NUM_DRAFTS = "SmolLM2-135M", 3
DRAFTER = "an EAGLE-3 head"
PROMPT = "Write a Python function that reverses a list."
NUM_TOKENS = 88

STYLE = """
svg{--paper:#fbfbf8;--card:#fff;--ink:#191b1d;--muted:#53585d;--line:#d6d9d4;--draft:#b9d6f6;--draft-line:#0b5cad;
--bonus:#fde2ac;--bonus-line:#9a5400;--replacement:#f8dcec;--replacement-line:#b0327c}
@media (prefers-color-scheme:dark){svg{--paper:#14171a;--card:#1b1f23;--ink:#eceef0;--muted:#a9b0b7;--line:#363c42;
--draft:#22486f;--draft-line:#7cbaff;--bonus:#573b04;--bonus-line:#ffb648;--replacement:#472a3c;
--replacement-line:#f08cc4}}
text{fill:var(--ink);font:13px ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.paper{fill:var(--paper)}.card{fill:var(--card);stroke:var(--line)}.muted{fill:var(--muted)}.bold{font-weight:600}
.code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.draft{fill:var(--draft)}.bonus{fill:var(--bonus)}.replacement{fill:var(--replacement)}.plain{fill:none}
.line{stroke-width:2;fill:none}.line.draft{stroke:var(--draft-line)}.line.bonus{stroke:var(--bonus-line)}
.line.replacement{stroke:var(--replacement-line);stroke-dasharray:2 2}.line.plain{stroke:none}
"""


# ---- an answer, with a drafter and without ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Token:
    """Came in this step, from 0: an entry of `token_sources`."""

    step: int
    text: str
    source: str


def ask(*, speculation: bool) -> list[Token]:
    """Stream the answer from the server."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": NUM_TOKENS, "stream": True,
        "return_token_sources": True, "speculative": {"enabled": speculation},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    tokens, step = [], 0
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            for one in json.loads(line[6:])["choices"][0].get("token_sources", []):
                tokens.append(Token(step=step, text=one["text"], source=one["source"]))
                step += one["source"] != "draft"  # whatever else there is ends its step
    connection.close()
    return tokens


def step_seconds(k: int) -> float:
    """What a step of `k` drafts took, prompts included, in the newest comparison on a CPU."""
    file = sorted((ROOT / "docs/numbers").glob("*-cpu-compare-smollm2.json"))[-1]
    (row,) = [row for row in json.loads(file.read_text())["rows"] if row["k"] == k]
    return row["acceptance_length"] / row["value"]


COLUMNS, ADVANCE, LEADING = 50, 7.9, 19
PANEL = COLUMNS * ADVANCE + 32


def draw_answers(fast: list[Token], slow: list[Token]) -> str:
    """Both side by side on one clock, over and over; still where the reader wants no motion."""
    assert [token.text for token in fast] == [token.text for token in slow]
    places = lay_out([token.text for token in slow])
    rows = 1 + max(row for pieces in places for row, _, _ in pieces)
    height, width = 108 + rows * LEADING + 44, 2 * PANEL + 48
    cycle = slow[-1].step * step_seconds(0) + 3.5
    out, frames = [], []
    sides = ((fast, f"with {DRAFTER}", step_seconds(NUM_DRAFTS)), (slow, "the model alone", step_seconds(0)))
    for side, (tokens, title, seconds) in enumerate(sides):
        left = 16 + side * (PANEL + 16)
        out.append(f'<rect class="card" x="{left}" y="50" width="{PANEL}" height="{height - 94}" rx="8"/>')
        out.append(f'<text class="bold" x="{left + 16}" y="76">{title}</text>')
        note = f"{len(tokens)} tokens in {tokens[-1].step + 1} steps"
        out.append(f'<text class="muted" x="{left + PANEL - 16}" y="76" text-anchor="end">{note}</text>')
        for step in sorted({token.step for token in tokens}):
            name = f"{'fs'[side]}{step}"
            frames.append(f"@keyframes {name}{{0%{{opacity:0}}{100 * step * seconds / cycle:.2f}%{{opacity:1}}}}")
            shapes = "".join(
                draw_piece(left + 16 + column * ADVANCE, 104 + row * LEADING, text, token.source)
                for token, pieces in zip(tokens, places, strict=True)
                if token.step == step
                for row, column, text in pieces
            )
            out.append(f'<g style="animation:{name} {cycle:.2f}s step-end infinite">{shapes}</g>')
    x, y = 24, height - 18
    legend = (("draft", "drafted, and accepted"), ("bonus", "the model's own, after all drafts"))
    for source, text in (*legend, ("replacement", "its own, in place of a draft that it rejected")):
        out.append(draw_piece(x, y, "  ", source) + f'<text class="muted" x="{x + 24}" y="{y}">{text}</text>')
        x += 60 + 7 * len(text)
    head = f'<text class="bold" x="24" y="32">{html.escape(PROMPT)}</text><text class="muted" x="{width - 24}" y="32" '
    head += f'text-anchor="end">{MODEL} on two CPU cores, at the measured pace</text>'
    still = "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    title = "An answer streamed with speculation, its tokens coloured by where they came from, and without"
    return svg(width, height, title, head + "".join(out), STYLE + "".join(frames) + still)


def lay_out(texts: list[str]) -> list[list[tuple[int, int, str]]]:
    """Of each token its pieces as (row, column, text), in lines of COLUMNS characters."""
    row = column = 0
    places = []
    for token in texts:
        pieces = []
        for number, text in enumerate(token.split("\n")):
            if number:
                row, column = row + 1, 0
            if column + len(text) > COLUMNS:
                row, column, text = row + 1, 0, text.lstrip()
            if text:
                pieces.append((row, column, text))
                column += len(text)
        places.append(pieces)
    return places


def draw_piece(x: float, y: float, text: str, source: str) -> str:
    width = len(text) * ADVANCE
    box = f'<rect class="{source}" x="{x:.1f}" y="{y - 13}" width="{width:.1f}" height="17" rx="2"/>'
    line = f'<path class="line {source}" d="M{x + 0.5:.1f} {y + 4}h{width - 1:.1f}"/>'
    if not text.strip():
        return box + line
    inner = f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
    return box + line + f'<text class="code" x="{x:.1f}" y="{y}" {inner}'


def svg(width: float, height: float, title: str, body: str, style: str = STYLE) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    paper = f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="10"/>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{html.escape(title)}</title>'
    return f"{start}<style>{style.strip()}</style>{paper}{body}</svg>\n"


# ---- one iteration ------------------------------------------------------------------------------


def draw_iteration() -> str:
    """The phases of an iteration to scale, over what others take for one and what the hardware needs."""
    goal = next(one for one in GOALS if (one.method, one.batch, one.model) == ("eagle3", 1, "llama-3.1-8b"))
    found = best_row(goal, newest_rows(read_runs(ROOT / "docs/numbers")))
    assert found
    took, floor = found.row["value"], found.row["floor"]
    phases = {row["phase"]: row for row in found.run.rows if row["metric"] == "phase_ms" and row["batch"] == 1}
    verify, first, chain = (phases[name] for name in ("target.verify", "draft.prefill", "draft.decode"))
    scale, left, top = 88, 150, 74
    out = [f'<text class="bold" x="24" y="32">One iteration: 3.5 tokens on average, {took:.2f} ms</text>']
    out.append(
        '<text class="muted" x="24" y="52">8B shape, EAGLE-3 head, five drafts, one request, one H200, bf16; to scale'
        "</text>"
    )
    x = left
    parts = [("draft", "target.verify: six tokens of the row in one pass", verify["value"])]
    parts += [("bonus", "", phases["accept"]["value"]), ("replacement", "", first["value"])]
    parts += [("replacement", "", chain["value"])] * int(chain["runs"])
    measured = sum(part[2] for part in parts)
    for kind, text, value in parts:
        width = value / measured * took * scale
        out.append(f'<rect class="{kind}" x="{x:.1f}" y="{top + 26}" width="{max(width - 1, 1.5):.1f}" height="34"/>')
        if text:
            out.append(f'<text x="{x + 10:.1f}" y="{top + 48}">{text}</text>')
        x += width
    end = left + took * scale
    out.append(f'<text x="{end + 10:.1f}" y="{top + 48}">accept, draft five</text>')
    arc = f"M{end:.1f} {top + 22}C{end:.1f} {top - 6} {left} {top - 6} {left} {top + 18}"
    out.append(f'<path class="line draft" d="{arc}" marker-end="url(#arrow)"/>')
    label = "the device repeats it, up to 64 times per launch"
    out.append(f'<text class="muted" x="{(left + end) / 2:.1f}" y="{top + 18}" text-anchor="middle">{label}</text>')
    out.append(f'<text class="bold" x="24" y="{top + 48}">draftloop</text>')
    ring = "tokens go out by a ring in pinned memory; the host only reads"
    out.append(f'<text class="muted" x="{left}" y="{top + 78}">{ring}</text>')
    assert isinstance(goal.sglang, float)
    assert isinstance(goal.vllm, float)
    bars = (
        ("floor", floor, "bytes over bandwidth"),
        ("SGLang 0.5.17", goal.sglang, ""),
        ("vLLM 0.26.0", goal.vllm, ""),
    )
    for place, (name, value, note) in enumerate(bars):
        y = top + 96 + place * 28
        out.append(f'<text x="24" y="{y + 14}">{name}</text>')
        out.append(f'<rect class="card" x="{left}" y="{y}" width="{value * scale:.1f}" height="20" rx="2"/>')
        text = f"{value:.2f} ms" + (f", {note}" if note else "")
        out.append(f'<text class="muted" x="{left + 10}" y="{y + 14}">{text}</text>')
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
    )
    arrow += '<path d="M0 0L8 4L0 8z" style="fill:var(--draft-line)"/></marker></defs>'
    return svg(left + 7.78 * scale + 24, top + 190, "The phases of one iteration to scale", arrow + "".join(out))


# ---- the page ---------------------------------------------------------------------------------


def photograph() -> None:
    """The page after an answer both ways, in light and dark."""
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("there is no Chromium (Debian: apt install chromium)")
    with sync_playwright() as driver, driver.chromium.launch(executable_path=browser, args=["--no-sandbox"]) as one:
        for scheme in ("light", "dark"):
            page = one.new_page(viewport={"width": 1000, "height": 640}, color_scheme=scheme)
            page.set_default_timeout(120_000)
            page.goto(f"http://127.0.0.1:{PORT}/")
            page.wait_for_selector(".status.ready")
            page.check("#compare")
            page.fill("#max-tokens", str(NUM_TOKENS))
            page.fill("#prompt", PROMPT)
            page.press("#prompt", "Enter")
            page.wait_for_selector(".verdict")
            page.evaluate("scrollTo(0, 0)")  # where no numbers show: they are of whatever machine this is
            page.locator(".token.replacement").first.hover()
            page.screenshot(path=PICTURES / f"page-{scheme}.png")
            page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("answers", "page", "iteration"), help="the one to draw; left out, all")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if options.only in (None, "iteration"):
        (PICTURES / "iteration.svg").write_text(draw_iteration(), encoding="utf-8")
    if options.only == "iteration":
        return
    limits = ["--max-num-seqs", "1", "--max-model-len", "1024", "--port", str(PORT), "--spec-tokens", str(NUM_DRAFTS)]
    with subprocess.Popen([sys.executable, "-m", "draftloop", "serve", "smollm2-135m", *limits]) as server:
        try:
            wait(server)
            if options.only != "page":
                text = draw_answers(ask(speculation=True), ask(speculation=False))
                (PICTURES / "answers.svg").write_text(text, encoding="utf-8")
            if options.only != "answers":
                photograph()
        finally:
            server.terminate()


def wait(server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
