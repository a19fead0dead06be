"""`bench structured`: schemas that are schemas, a judge that can say no, and SmolLM2 under speculation."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from draftloop.bench import structured
from draftloop.bench.schemas import KINDS, schema_prompts
from draftloop.bench.structured import Judged, judge, run_structured, structured_rows
from draftloop.config.engine import EngineConfig
from draftloop.errors import ConfigError
from draftloop.sampling import grammar

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.skipif(find_spec("jsonschema") is None, reason="jsonschema is not installed")


@pytest.fixture(scope="module", autouse=True)
def _no_process_stays():
    yield
    grammar._COMPILERS.close()


def test_the_schemas_are_valid_assorted_and_always_the_same():
    import jsonschema  # which takes seconds

    asked = schema_prompts(200)
    for one in asked:
        jsonschema.Draft202012Validator.check_schema(one.schema)
    assert {one.kind for one in asked} == set(KINDS)
    assert len({json.dumps(one.schema) for one in asked}) > 190
    assert schema_prompts(30) == asked[:30]
    assert schema_prompts(30, seed=1) != asked[:30]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n": 3, "day": "2024-02-29"}', ""),
        ('{"n": 3', "not JSON"),
        ('{"n": 31, "day": "2024-02-29"}', "31 is greater than the maximum of 30"),
        ('{"n": 3, "day": "2023-02-29"}', "is not a 'date'"),
        ('{"n": 3}', "'day' is a required property"),
        ('{"n": 3, "day": "2024-02-29", "m": 1}', "'m' was unexpected"),
    ],
)
def test_the_judge_knows_valid_from_invalid(text, why):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 30}, "day": {"type": "string", "format": "date"}},
        "required": ["n", "day"],
        "additionalProperties": False,
    }
    assert (why in judge(text, schema)) if why else judge(text, schema) == ""


def test_what_max_tokens_cut_is_neither_valid_nor_invalid():
    def one(kind: str, verdict: structured.Verdict) -> Judged:
        return Judged(kind=kind, temperature=0, verdict=verdict, text="", why="", num_tokens=11, num_steps=5)

    whole, *parts = structured_rows([one("flat", "valid"), one("flat", "cut"), one("calls", "invalid")])
    assert (whole["valid"], whole["invalid"], whole["cut"], whole["value"]) == (1, 1, 1, 0.3333)
    assert whole["acceptance_length"] == 2.0
    assert [(row["schemas"], row["value"]) for row in parts] == [("flat", 0.5), ("calls", 0.0)]


def test_without_jsonschema_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"draftloop\[bench\]"):
        judge("{}", {})


def test_smollm2_answers_obey_their_schemas_whatever_its_head_drafts(tmp_path, monkeypatch):
    shortest = sorted(schema_prompts(120), key=lambda one: len(json.dumps(one.schema)))[:5]
    monkeypatch.setattr(structured, "schema_prompts", lambda count: shortest[:count])
    config = EngineConfig.from_mapping(
        model="smollm2-135m",
        max_model_len=256,
        max_num_seqs=5,
        device="cpu",
        speculative_config={"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3},
    )
    path = run_structured(config, num_prompts=5, max_tokens=128, temperatures=(1.0,), out=tmp_path / "valid.json")
    row = json.loads(path.read_text())["rows"][0]
    assert (row["num_prompts"], row["valid"], row["value"]) == (5, 5, 1.0)
    assert row["acceptance_length"] > 1.2, "drafts were accepted"
