"""The drafters that come with the package: complete, light, as good as they were, and without effect on the text."""

from __future__ import annotations

import json

import pytest
from make_pin import HEAD, PIN, TARGET, measure

from draftloop import LLM, RequestOutput, SamplingParams
from draftloop.bench.acceptance import measure_acceptance, shares_accepted, step_histogram
from draftloop.bench.ask import render
from draftloop.bench.check_drafter import method_of
from draftloop.bench.prompts import load_prompts
from draftloop.drafters.dflash_files import MASK_EMBEDDING
from draftloop.drafters.made_for import TARGET_KEY
from draftloop.models.resolve import SHIPPED, read_json, shipped

MOST_BYTES = 28_000_000
"""Of all together: they are in every clone and every wheel."""
PROMISED = {
    "smollm2-135m-eagle3": ("eagle3", 5, 2.8),
    "smollm2-135m-dflash": ("dflash", 7, 2.5),
    "smollm2-135m-draft": ("draft_model", 4, 2.4),
}
"""Name -> method, K, and mean acceptance length at temperature 0 over all of MT-bench."""
SLACK = 0.7
"""What a few prompts may fall short of all of them."""
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)

EACH = pytest.mark.parametrize("name", PROMISED)


def test_what_was_promised_is_shipped_and_all_of_it_is_light():
    assert set(shipped()) == PROMISED.keys()
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < MOST_BYTES


@EACH
def test_a_shipped_drafter_says_what_it_is(name):
    folder = SHIPPED / name
    files = {path.name for path in folder.iterdir()} - {MASK_EMBEDDING}
    assert files == {"README.md", "config.json", "model.safetensors"}
    assert method_of(name) == PROMISED[name][0]
    assert read_json(folder / "config.json")[TARGET_KEY]["name"] == TARGET
    assert "draftloop train" in (folder / "README.md").read_text(encoding="utf-8")


def make(**settings) -> LLM:
    return LLM(TARGET, dtype="float32", device="cpu", max_num_seqs=4, max_model_len=512, **settings)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[RequestOutput]]:
    """Prompts of four categories, and how the target by itself answers the first two."""
    llm = make()
    asked = render(llm, [prompt.turns[0] for prompt in load_prompts("mt_bench")[::20]], max_tokens=NUM_TOKENS)
    outputs = llm.generate(asked[:2], GREEDY)
    llm.close()
    return asked, outputs


@EACH
def test_a_shipped_drafter_keeps_its_promise_and_the_text(name, plain):
    method, num_drafts, length = PROMISED[name]
    asked, wanted = plain
    llm = make(speculative_config={"method": method, "model": name, "num_speculative_tokens": num_drafts})
    outputs = llm.generate(asked, GREEDY)
    llm.close()
    assert 1 + sum(shares_accepted([step_histogram(output.spec) for output in outputs])) >= SLACK * length
    for drafted, alone in zip(outputs, wanted, strict=False):
        assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids


def test_the_eagle3_head_is_accepted_as_often_as_ever():
    pinned, found = json.loads(PIN.read_text(encoding="utf-8")), measure()
    assert found["weights"] == pinned["weights"], "the head's weights changed: run tests/e2e/make_pin.py"
    assert found["acceptance_length"] == pytest.approx(pinned["acceptance_length"], rel=0.01)


def test_a_tree_is_accepted_at_least_as_far_as_the_chain_that_it_holds():
    asked = load_prompts("mt_bench")[::40]

    def length(**drafts) -> float:
        llm = make(speculative_config={"method": "eagle3", "model": HEAD, **drafts})
        found = measure_acceptance(llm, {"mt_bench": asked}, max_tokens=20, temperature=0, show_progress=False)
        llm.close()
        return 1 + sum(shares_accepted([answer.histogram for answer in found]))

    chain = length(num_speculative_tokens=3)
    assert length(speculative_token_tree="[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]") >= chain > 1.2
