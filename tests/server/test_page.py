"""The page at /: what is committed is what web/ builds, and a real browser shows where tokens come from."""

from __future__ import annotations

import fcntl
import filecmp
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from servers import Server, events, running

from draftloop.server.page import FILES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
WEB, SERVED = ROOT / "web", ROOT / "src/draftloop/server/page"
BUILD = ROOT / "build/page"
"""Screenshots of the last run, and a lock."""

KEY = "sesame"
PROMPT = "Write a Python function that reverses a list."
CHAT = "/v1/chat/completions"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 60_000
"""For a machine that does other things too."""
expect = playwright.expect
expect.set_options(timeout=PATIENCE_MS)


def missing(what: str) -> None:
    """Skip, but not where everything has to run."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


# ---- what is built --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def npm_packages() -> None:
    """What building takes, from npm unless it is there already."""
    if not shutil.which("npm"):
        missing("npm is not there; the committed page is served as it is")
    installed, lock_file = WEB / "node_modules/.installed", WEB / "package-lock.json"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one installs
        if not installed.exists() or installed.stat().st_mtime < lock_file.stat().st_mtime:
            done = subprocess.run(["npm", "ci", "--silent"], cwd=WEB, capture_output=True, text=True, timeout=300)
            if done.returncode:
                missing(f"npm cannot install what the page is built with: {done.stderr[-300:]}")
            installed.touch()


def npm_run(*arguments: str) -> str:
    done = subprocess.run(["npm", "run", "--silent", *arguments], cwd=WEB, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("npm_packages")
def test_the_committed_page_is_what_its_sources_build(tmp_path):
    npm_run("build", "--", str(tmp_path))
    built = sorted(path.name for path in tmp_path.iterdir())
    assert built == sorted(name for name, _ in FILES.values())
    _, differing, absent = filecmp.cmpfiles(tmp_path, SERVED, built, shallow=False)
    assert differing + absent == [], "run `make page` and commit what it builds"


@pytest.mark.usefixtures("npm_packages")
def test_the_sources_are_well_typed_and_pass_their_own_tests():
    npm_run("check")
    assert re.search(r"^# fail 0$", npm_run("test"), re.MULTILINE)


def test_the_wheel_has_the_page():
    from hatchling.builders.wheel import WheelBuilder

    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"draftloop/server/page/{name}" for name, _ in FILES.values()} <= files


# ---- what is served -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model with the shipped head; one answer at a time, and nobody may wait."""
    limits = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 27), "--device", "cpu"]
    options = ["--max-num-seqs", "1", "--max-waiting", "0", "--api-key", KEY]
    with running(*options, model="smollm2-135m", limits=limits, command=True) as one:
        one.headers["Authorization"] = f"Bearer {KEY}"
        yield one


def test_files_need_no_key_let_nothing_else_in_and_are_sent_again_only_when_changed(server):
    for path, (name, media_type) in FILES.items():
        status, headers, data = server.request("GET", path, Authorization="")
        assert (status, headers["content-type"], data) == (200, media_type, (SERVED / name).read_bytes())
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert server.request("GET", path, **{"If-None-Match": headers["etag"]})[0::2] == (304, b"")
        assert server.request("HEAD", path, Authorization="")[0::2] == (200, b"")
    assert server.request("GET", "/page/../app.py", Authorization="")[0] == 401
    assert not any(path in server.get("/openapi.json")["paths"] for path in FILES)


def test_the_page_asks_nobody_else_for_anything():
    for name, _ in FILES.values():
        hosts = set(re.findall(r"https?://[\w.]+", (SERVED / name).read_text()))
        assert hosts <= {"http://www.w3.org"}, name  # the name of SVG


# ---- in a browser ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing("there is no Chromium (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        with driver.chromium.launch(executable_path=CHROMIUM, args=options) as one:
            yield one


@contextmanager
def opened(
    browser: Browser, server: Server, *, key: str = KEY, refused: bool = False, **options: Any
) -> Iterator[Page]:
    """The page in a window of its own. `refused`: the test lets requests fail, which a browser's console reports."""
    complaints = []
    with browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options}) as context:
        context.set_default_timeout(PATIENCE_MS)
        if key:
            context.add_init_script(f"sessionStorage.setItem('draftloop-api-key', '{key}')")
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        yield page
    if refused:
        complaints = [text for text in complaints if "Failed to load resource" not in text]
    assert complaints == []


def is_ready(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("ready")


def ask(page: Page, prompt: str = PROMPT, *, max_tokens: int = 16) -> Locator:
    """Ask, and wait until all is answered; the turn."""
    page.fill("#max-tokens", str(max_tokens))
    count = page.locator(".turn").count()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    turn = page.locator(".turn").nth(count)
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)
    expect(turn.locator("[aria-busy=true]")).to_have_count(0)
    return turn


def tab_to(page: Page, selector: str) -> None:
    """With the Tab key alone."""
    for _ in range(30):
        if page.locator(selector).first.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key never comes to {selector}")


def expected(server: Server, max_tokens: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The sources of the answer's tokens, and what the server says of its speculation."""
    body = {"temperature": 0, "max_tokens": max_tokens, "return_token_sources": True}
    body |= {"messages": [{"role": "user", "content": PROMPT}], "stream_options": {"include_usage": True}}
    *pieces, last = server.stream(CHAT, body)
    sources = [one for piece in pieces for one in piece["choices"][0].get("token_sources", [])]
    return sources, last["metrics"]["speculative_decoding"]


def number(turn: Locator, name: str) -> str:
    return turn.locator(".numbers div", has_text=name).locator("dd").first.inner_text()


LOOKS = """element => {
  const style = getComputedStyle(element);
  return [style.backgroundColor, style.textDecorationLine === "none" ? "none" : style.textDecorationStyle];
}"""


def test_with_the_keyboard_alone_a_prompt_is_answered_in_tokens_that_show_where_they_came_from(browser, server):
    with opened(browser, server, key="", refused=True) as page:
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_be_visible()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        is_ready(page)

        tab_to(page, "#max-tokens")
        page.keyboard.press("Control+A")
        page.keyboard.type("32")
        page.keyboard.press("Shift+Tab")
        for _ in range(8):
            if page.locator("#prompt").evaluate("element => element === document.activeElement"):
                break
            page.keyboard.press("Shift+Tab")
        page.keyboard.type(PROMPT)
        page.keyboard.press("Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)

        sources, stats = expected(server, 32)
        tokens = page.locator(".answer .token")
        shown = tokens.evaluate_all("all => all.map(one => [one.textContent, one.classList[1]])")
        assert shown == [[one["text"], one["source"]] for one in sources]

        # colours and underlines tell the four kinds apart, here and in the legend; shades the positions
        looks = {kind: page.locator(f".legend .{kind}").first.evaluate(LOOKS) for kind in ("draft", "bonus", "plain")}
        looks["replacement"] = page.locator(".legend .replacement").evaluate(LOOKS)
        assert len({colour for colour, _ in looks.values()}) == 4
        assert {line for _, line in looks.values()} == {"solid", "double", "wavy", "none"}
        for at, one in enumerate(sources):
            colour, line = tokens.nth(at).evaluate(LOOKS)
            assert line == looks[one["source"]][1]
            assert one["source"] == "draft" or colour == looks[one["source"]][0]
        by_position = {
            one["position"]: tokens.nth(at).evaluate(LOOKS)[0] for at, one in enumerate(sources) if "position" in one
        }
        assert len(set(by_position.values())) == len(by_position) > 1

        turn, histogram = page.locator(".turn"), stats["acceptance_histogram"]
        assert number(turn, "Acceptance length") == f"{stats['mean_acceptance_length']:.2f}"
        assert float(number(turn, "Tokens per second")) > 0
        shares = [sum(histogram[place:]) / sum(histogram) for place in range(1, len(histogram))]
        assert turn.locator(".chart .value").all_text_contents() == [f"{share * 100:.0f}%" for share in shares]

        # the rejected drafts: by the arrow keys, heard and seen
        place, replaced = next((i, one) for i, one in enumerate(sources) if "rejected" in one)
        tab_to(page, ".answer .tokens")
        page.keyboard.press("Home")
        for _ in range(place):
            page.keyboard.press("ArrowRight")
        for draft in replaced["rejected"]:
            expect(page.locator("#token-card")).to_contain_text(draft["text"].strip())
            expect(page.locator("#spoken")).to_contain_text(draft["text"].strip())
        page.keyboard.press("Escape")
        expect(page.locator("#token-card")).to_be_hidden()
        tokens.nth(place).hover()  # and by the pointer
        expect(page.locator("#token-card s")).to_have_count(len(replaced["rejected"]))
        page.screenshot(path=BUILD / "light.png")


def test_speculation_is_turned_off_and_both_ways_stand_side_by_side(browser, server):
    with opened(browser, server) as page:
        is_ready(page)
        page.uncheck("#speculation")
        turn = ask(page)
        assert set(turn.locator(".token").evaluate_all("all => all.map(one => one.className)")) == {"token plain"}
        expect(turn.locator(".chart")).to_have_count(0)
        page.check("#compare")
        expect(page.locator("#speculation")).to_be_disabled()
        page.click("#restart")
        turn = ask(page)
        fast, slow = (turn.locator(".answer").nth(place) for place in (0, 1))
        assert fast.locator(".tokens").inner_text() == slow.locator(".tokens").inner_text()
        assert fast.locator(".draft").count() > 0
        assert slow.locator(".draft").count() == 0
        (left, right) = (one.bounding_box() for one in (fast, slow))
        assert left
        assert right
        assert right["x"] >= left["x"] + left["width"], "side by side"
        expect(turn.locator(".verdict")).to_have_text(
            re.compile(r"^\d+\.\d\d. as fast with speculation; the text is the same\.$")
        )
        page.screenshot(path=BUILD / "compare.png")


CONTRASTS = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && element.parentElement ? ground(element.parentElement) : colour;
  };
  const texts = ".token, dt, dd, figcaption, button:enabled, .status, #server, .prompt, summary, td, th";
  return [...document.querySelectorAll(texts)].filter((element) => element.checkVisibility()).map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.className || element.tagName];
  });
}"""


def test_a_phone_shows_all_of_it_in_light_and_dark_with_contrast_and_nothing_moves_that_need_not(browser, server):
    phone = {"viewport": {"width": 340, "height": 700}, "has_touch": True, "reduced_motion": "reduce"}
    with opened(browser, server, **phone, device_scale_factor=2) as page:
        is_ready(page)
        ask(page)
        page.locator("summary").first.click()
        expect(page.locator("table.coverage").first).to_be_visible()
        coverage = page.locator("tr", has_text="target.verify").first
        assert int(coverage.locator(".count").first.inner_text()) > 0
        assert coverage.locator(".cell.full.used").count() == 1
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= 340
            poor = [found for found in page.evaluate(CONTRASTS) if found[0] < 4.5]
            assert poor == [], scheme
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=BUILD / f"phone-{scheme}.png")
        assert page.locator(".bar").first.evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"
        page.locator(".token.draft").first.tap()
        box = page.locator("#token-card").bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 340


@pytest.mark.usefixtures("npm_packages")
def test_no_rule_of_accessibility_is_broken(browser, server):
    rules = (WEB / "node_modules/axe-core/axe.min.js").read_text()
    with opened(browser, server, bypass_csp=True) as page:  # axe makes markup of texts
        is_ready(page)
        ask(page, max_tokens=8)
        for summary in page.locator("summary").all():
            summary.click()
        page.evaluate(rules)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
            assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_a_busy_server_a_stopped_answer_and_a_dead_engine_are_said_in_words(browser, server):
    with opened(browser, server, refused=True) as page:
        is_ready(page)
        long = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True}
        connection, response = server.start_stream(CHAT, long)
        with closing(connection):
            next(events(response))
            turn = ask(page)
        error = turn.get_by_role("alert")
        expect(error).to_contain_text("The server is busy: 1 requests are open")
        server.assert_all_free()
        error.get_by_role("button", name="Try again").click()
        turn = page.locator(".turn")
        expect(turn.locator(".token").first).to_be_visible(timeout=PATIENCE_MS)
        expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)
        expect(turn).to_have_count(1)

        page.fill("#max-tokens", "900")
        page.fill("#prompt", "Write a very long story.")
        page.press("#prompt", "Enter")
        expect(turn.nth(1).locator(".token").nth(3)).to_be_visible(timeout=PATIENCE_MS)
        page.keyboard.press("Escape")
        expect(turn.nth(1).locator(".note")).to_have_text("Stopped.")
        server.assert_all_free()

        page.click("#restart")
        page.fill("#prompt", "Write a very long story.")  # of hundreds of tokens, when nothing stands before it
        page.press("#prompt", "Enter")
        expect(turn).to_have_count(1)
        expect(turn.locator(".token").nth(3)).to_be_visible(timeout=PATIENCE_MS)
        os.kill(server.engine_pid, signal.SIGKILL)
        dead = "he engine's process has ended (exit code -9)"
        expect(turn.get_by_role("alert")).to_contain_text(f"T{dead}.")
        expect(page.locator("#status")).to_have_text(f"t{dead}")
        expect(page.locator("#send")).to_be_disabled()
        page.screenshot(path=BUILD / "dead.png")
