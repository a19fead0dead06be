"""`bench acceptance` and `compare`: what is counted, how it is grouped, and what cannot be measured."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop import cli
from draftloop.bench import acceptance, compare
from draftloop.bench.acceptance import ALL, LOOP_FREE, Answer, acceptance_rows, measure_acceptance, shares_accepted
from draftloop.bench.against_transformers import run_against_transformers
from draftloop.bench.ask import render
from draftloop.bench.plots import pyplot
from draftloop.bench.prompts import Prompt
from draftloop.config import EngineConfig
from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from helpers import engine, prompts, tiny_model

MAX_TOKENS = 24


def target() -> str:
    return tiny_model("asked", words="w")


def near() -> str:
    return tiny_model("asked-near", noise=0.06, words="w")


def questions(name: str, count: int | None = None) -> list[Prompt]:
    """Six prompts, or the first of them, in words of the tiny tokenizer; those of mt_bench are of two categories."""
    return [
        Prompt(
            question_id=index,
            category="writing" if name == "mt_bench" and index % 2 else "math",
            turns=(" ".join(f"w{token}" for token in ids), "never asked"),
        )
        for index, ids in enumerate(prompts(6, seed=len(name)))
    ][:count]


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # of tables
    monkeypatch.setattr(acceptance, "load_prompts", questions)
    monkeypatch.setattr(compare, "load_prompts", questions)


# ---- counting -------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), max_size=5))
def test_mean_length_is_one_and_the_shares(histograms):
    shares = shares_accepted(histograms)
    steps = sum(map(sum, histograms))
    tokens = sum(count * (1 + accepted) for histogram in histograms for accepted, count in enumerate(histogram))
    assert 1 + sum(shares) == pytest.approx(tokens / steps if steps else 1)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_token_but_the_first_is_in_the_mean(method, temperature):
    """Steps for which lookup found nothing count too."""
    spec = {"method": method, "num_speculative_tokens": 3, **({"model": near()} if method == "draft_model" else {})}
    llm = engine(target(), speculative_config=spec)
    sets = {"mt_bench": questions("mt_bench"), "gsm8k": questions("gsm8k")}
    answers = measure_acceptance(llm, sets, max_tokens=MAX_TOKENS, temperature=temperature, show_progress=False)
    assert [answer.prompts for answer in answers] == ["mt_bench"] * 6 + ["gsm8k"] * 6
    for row in acceptance_rows(answers):
        if row["num_prompts"]:
            assert row["num_tokens"] == row["num_prompts"] * MAX_TOKENS
            more = row["value"] * row["num_steps"] - (row["num_tokens"] - row["num_prompts"])
            assert -0.01 < more < row["num_prompts"] + 0.01, (
                "a request's last step may have no room for its bonus token"
            )
            assert row["value"] == pytest.approx(1 + sum(row["per_position"]), abs=1e-3)


def answer(category: str, loops: bool, histogram: tuple[int, ...], temperature: float = 0.0) -> Answer:
    return Answer(
        prompts="mt_bench",
        category=category,
        temperature=temperature,
        histogram=histogram,
        num_tokens=10,
        loops=loops,
    )


def test_loops_are_told_apart_in_every_group():
    rows = list(
        acceptance_rows(
            [
                answer("math", True, (0, 0, 10)),
                answer("math", False, (10, 0, 0)),
                answer("writing", True, (0, 10, 0)),
                answer("math", False, (0, 10, 0), temperature=1.0),
            ]
        )
    )
    found = {(row["temperature"], row["category"], row["text"]): (row["value"], row["num_prompts"]) for row in rows}
    assert found == {
        (0.0, ALL, ALL): (2.0, 3),
        (0.0, ALL, LOOP_FREE): (1.0, 1),
        (0.0, "math", ALL): (2.0, 2),
        (0.0, "math", LOOP_FREE): (1.0, 1),
        (0.0, "writing", ALL): (2.0, 1),
        (0.0, "writing", LOOP_FREE): (None, 0),
        (1.0, ALL, ALL): (2.0, 1),
        (1.0, ALL, LOOP_FREE): (2.0, 1),
    }
    assert [row["loop_free_share"] for row in rows] == [0.3333, 0.3333, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0]


# ---- from the command line ------------------------------------------------------------------

SMALL = ["--device", "cpu", "--max-model-len", "128", "--kv-cache-memory-bytes", str(1 << 24), "--enforce-eager"]


def run(*arguments: str) -> None:
    cli.main([*arguments, *SMALL])


def test_acceptance_writes_numbers_and_a_picture(tmp_path, capsys):
    drafter = ["--target", target(), "--drafter", f"{near()}:3", "--max-tokens", str(MAX_TOKENS)]
    run(
        "bench", "acceptance", *drafter, "--prompts", "mt_bench,humaneval", "--num-prompts", "4", "--out", str(tmp_path)
    )
    (path,) = tmp_path.glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 1000
    got = json.loads(path.read_text())
    assert {"command", "gpu", "git", "versions", "rows"} <= got.keys()
    rows = got["rows"]
    assert {row["metric"] for row in rows} == {"acceptance_length"}
    assert {(row["method"], row["drafter"], row["k"]) for row in rows} == {("draft_model", near(), 3)}
    assert {(row["temperature"], row["prompts"], row["category"]) for row in rows} == {
        (temperature, *group)
        for temperature in (0.0, 1.0)
        for group in (("mt_bench", ALL), ("mt_bench", "math"), ("mt_bench", "writing"), ("humaneval", ALL))
    }
    assert rows[0]["num_prompts"] == 4
    assert 1.2 < rows[0]["value"] < 4
    assert "Tokens per step" in capsys.readouterr().out


def test_compare_takes_turns_and_agrees(tmp_path, capsys):
    drafters = f"none,ngram:2,{near()}:3"
    arguments = ["--target", target(), "--drafters", drafters, "--num-prompts", "5", "--max-tokens", str(MAX_TOKENS)]
    run("compare", *arguments, "--repeats", "2", "--max-num-seqs", "2", "--out", str(tmp_path / "it.json"))
    assert (tmp_path / "it.png").stat().st_size > 1000
    none, ngram, draft = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [row["method"] for row in (none, ngram, draft)] == ["none", "ngram", "draft_model"]
    assert [row["k"] for row in (none, ngram, draft)] == [0, 2, 3]
    assert (none["ratio"], none["acceptance_length"], none["per_position"]) == (1.0, 1.0, [])
    assert draft["acceptance_length"] > 1.2
    for row in (none, ngram, draft):
        assert row["min"] <= row["value"] <= row["max"]
        assert row["ratio"] > 0
        assert row["same_tokens"] is True
        assert (row["batch"], row["num_prompts"]) == (2, 5)
    assert "against none" in capsys.readouterr().out


class FakeEngine:
    """Says who was asked what."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompts, params):
        self.log.append((self.name, list(prompts), [p.seed for p in params]))
        return [type("Output", (), {"outputs": [type("Answer", (), {"token_ids": [1, 2]})]}) for _ in prompts]


def test_turns_change_who_goes_first_and_every_prompt_is_asked_each_round():
    log: list = []
    contenders = [compare.Contender(name=name, llm=FakeEngine(name, log)) for name in "ab"]  # type: ignore[arg-type]
    ids = [[i] for i in range(3)]
    compare.take_turns(contenders, ids, SamplingParams(max_tokens=8), batch=2, repeats=2)
    warm, turns = log[:2], log[2:]
    assert [name for name, *_ in warm] == ["a", "b"]
    assert [name for name, *_ in turns] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    for name in "ab":
        assert [prompt for who, asked, _ in turns for prompt in asked if who == name] == ids * 2
        assert [seed for who, _, seeds in turns for seed in seeds if who == name] == [0, 1, 2] * 2
    assert [len(contender.speeds) for contender in contenders] == [2, 2]


# ---- what cannot be measured ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "acceptance"], "no acceptance without speculation"),
        (
            ["bench", "acceptance", "--drafter", "ngram:3", "--spec-tokens", "2"],
            "says num_speculative_tokens 3, another",
        ),
        (["bench", "acceptance", "--drafter", "eagle3:3"], "names a method that needs a checkpoint"),
        (["bench", "acceptance", "--drafter", "ngram:3", "--prompts", "mtbench"], "did you mean 'mt_bench'"),
        (["bench", "acceptance", "--drafter", "ngram:3", "--temperature", "0,hot"], "'0,hot' are not numbers"),
        (["bench", "acceptance", "--drafter", "ngram:3", "--temperature", "-1"], "temperature is -1.0"),
        (["bench", "acceptance", "--drafter", "ngram:3", "--num-prompts", "0"], "--num-prompts is 0"),
        (["bench", "acceptance", "--drafter", "ngram:3", "--max-tokens", "125"], "exceed max_model_len 128"),
        (["bench", "acceptance", "--drafter", "ngrm:3"], "unknown drafter 'ngrm'; did you mean 'ngram'?"),
        (["compare", "--drafters", "none,ngram"], "'ngram' comes without a number of drafts; .* 'ngram:4'"),
        (["compare", "--drafters", "none,none"], "each once"),
        (["compare", "--drafters", "ngram:3", "--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        run(*arguments, "--target", target())
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_target_without_words_is_refused():
    llm = engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match="no tokenizer; name one with --tokenizer"):
        render(llm, ["hello"], max_tokens=1)


def test_what_cannot_be_compared_with_transformers_is_refused(tmp_path):
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    for speculation, message in ((None, "give a --speculative-config"), (spec, "no tokenizer; name one with --token")):
        config = EngineConfig.from_mapping(model=tiny_model(), device="cpu", speculative_config=speculation)
        with pytest.raises(ConfigError, match=message):
            run_against_transformers(config, output_tokens=4, repeats=1, out=tmp_path)


def test_without_matplotlib_no_picture_is_drawn_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert pyplot() is None
    assert "that needs matplotlib; pip install 'draftloop[bench]'" in caplog.text
