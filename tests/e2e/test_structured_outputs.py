"""Grammars under speculation: every token obeys, whatever is drafted, and wherever in a block the grammar begins.

The model's tokens are bytes, so that a grammar cuts anywhere; its own text is noise, so that whatever is valid
is so because of the grammar.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from draftloop.errors import RequestError
from draftloop.request import SamplingParams
from helpers import answers, assert_all_free, engine, greedy, make_engine, prompts, tiny_model

pytest.importorskip("xgrammar")

VOCAB, EOS, THINK_END = 288, 256, 257
K = 4
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc", "xyz"]}, "n": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}
GRAMMARS = {
    "json": {"json": SCHEMA, **COMPACT},
    "json text": {"json": json.dumps(SCHEMA), **COMPACT},
    "regex": {"regex": "[a-c]{2,5}-[0-9]{1,3}(x|yy)"},
    "choice": {"choice": ["yes", "no", 'a "quoted" one', "yesterday"]},
    "structural_tag": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": {"enum": ["left", "right"]}},
                "end": "</call>",
            },
        }
    },
    "grammar": {"grammar": 'root ::= "<" item ("," item){0,2} ">"\nitem ::= [a-f]+ ";"'},
}


def valid(name: str, text: str) -> bool:
    if name.startswith("json"):
        found = json.loads(text)
        return found["name"] in ("ab", "abc", "xyz") and 1 <= found["n"] <= 30 and len(found) == 2
    if name == "choice":
        return text in GRAMMARS["choice"]["choice"]
    if name == "structural_tag":
        return text in ('<call>"left"</call>', '<call>"right"</call>')
    pattern = GRAMMARS["regex"]["regex"] if name == "regex" else "<[a-f]+;(,[a-f]+;){0,2}>"
    return re.fullmatch(pattern, text) is not None


@functools.cache
def target() -> str:
    folder = Path(tiny_model("bytes", vocab=VOCAB, eos=EOS, max_len=300))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def ids_of(text: str) -> list[int]:
    return structured().get_tokenizer().encode(text, add_special_tokens=False)


HELD: dict[str, list[int]] = {"drafts": [], "start": []}
"""What the scripted drafter holds from some place on."""


def script(request_id: str, token_ids: list[int], k: int) -> list[int]:
    place = len(token_ids) - HELD["start"][0]
    return HELD["drafts"][place : place + k]


def structured(spec=None, *, sizes=(2, 8), **options):
    if spec == "scripted":
        spec = {"method": "scripted", "script": script, "num_speculative_tokens": K}
    elif spec == "self_draft":
        spec = {"method": "draft_model", "model": target(), "num_speculative_tokens": K}
    elif spec is not None:
        spec = {"method": spec, "num_speculative_tokens": K, "prompt_lookup_min": 1}
    return engine(target(), speculative_config=spec, cudagraph_capture_sizes=sizes, **options)


def obeys(name: str, *, temperature: float = 0.0, seed: int = 0, max_tokens: int = 100, **options) -> SamplingParams:
    grammar = {**GRAMMARS[name], **options}
    # a long run of letters is likelier than its end, to a model of noise
    bias = {ids_of(end)[0]: 20.0 for end in (">", ";", '"', "}")} if name == "grammar" else None
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=grammar, logit_bias=bias
    )


@functools.cache
def plain_answers() -> dict[str, list[int]]:
    """Greedy answers without speculation, by grammar."""
    outputs = structured().generate(prompts(len(GRAMMARS), vocab=200), [obeys(name) for name in GRAMMARS])
    return dict(zip(GRAMMARS, answers(outputs), strict=True))


# ---- validity -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("spec", [None, "ngram", "self_draft"])
def test_every_kind_of_grammar_is_obeyed_and_greedy_answers_do_not_depend_on_drafts(spec, overlap):
    whole = {"cudagraph_mode": "FULL", "iteration_graph": True, "async_scheduling": True} if overlap else {}
    llm = structured(spec, **whole)
    asked = prompts(len(GRAMMARS) + 1, vocab=200)
    params = [*(obeys(name) for name in GRAMMARS), greedy(30)]
    outputs = llm.generate(asked, params)
    for name, output in zip(GRAMMARS, outputs, strict=False):
        assert valid(name, output.outputs[0].text), (name, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"
    assert answers(outputs)[:-1] == list(plain_answers().values())
    assert answers(outputs)[-1] == answers(structured().generate(asked[-1], greedy(30)))[0], "a free neighbour"
    assert_all_free(llm)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_answers_are_valid_too(rule):
    spec = {"method": "draft_model", "model": target(), "num_speculative_tokens": K, "rejection_sample_method": rule}
    llm = engine(target(), speculative_config=spec, cudagraph_capture_sizes=(8,))
    names = [name for name in GRAMMARS if name != "grammar"] * 3
    params = [obeys(name, temperature=1.5, seed=i) for i, name in enumerate(names)]
    outputs = llm.generate([prompts(2)[1]] * len(names), params)
    for name, output in zip(names, outputs, strict=True):
        assert valid(name, output.outputs[0].text), (name, output.outputs[0].text)
    assert len({output.outputs[0].text for output in outputs}) >= 5


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY"])
def test_b07_grammars_hold_while_the_number_of_drafts_follows_the_load(mode):
    """Masks are of as many positions as a step verifies: four, two or one."""
    spec = {"method": "draft_model", "model": target(), "num_speculative_tokens": 3}
    schedule = ((1, 2, 3), (3, 5, 1), (6, 12, 0))
    llm = engine(
        target(),
        speculative_config={**spec, "num_speculative_tokens_per_batch_size": schedule},
        cudagraph_mode=mode,
        max_num_seqs=12,
        cudagraph_capture_sizes=(2, 12),
    )
    names = [name for name in GRAMMARS if name != "grammar"]
    asked = prompts(len(GRAMMARS) + 1, vocab=200)
    drafting = llm.engine.core.scheduler.drafting
    drafting.steps_by_count.clear()
    wanted = [plain_answers()[name] for name in names]
    picked = [asked[list(GRAMMARS).index(name)] for name in names]
    neighbours = [greedy(count) for count in (8, 8, 40, 40, 40, 60)]  # the batch shrinks through the schedule
    outputs = llm.generate([*picked, *[asked[-1]] * 6], [*map(obeys, names), *neighbours])
    assert answers(outputs)[: len(names)] == wanted
    assert answers(llm.generate(picked[:1], [obeys(names[0])])) == wanted[:1]
    assert {count for count, steps in drafting.steps_by_count.items() if steps} == {3, 1, 0}
    assert_all_free(llm)


def test_a_request_behind_one_with_a_grammar_is_free_again():
    llm = structured("self_draft", max_num_seqs=1, sizes=(1,))
    prompt = prompts(1)[0]
    free = answers(llm.generate(prompt, greedy(20)))
    llm.generate(prompt, obeys("choice"))
    assert answers(llm.generate(prompt, greedy(20))) == free


# ---- drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["right", "illegal id", "illegal token", "past the end", "nothing"])
@pytest.mark.parametrize("name", ["json", "choice"])
def test_b32_drafts_that_the_grammar_forbids_are_rejected_quietly(caplog, capfd, name, wrong):
    llm = structured("scripted")
    prompt = prompts(len(GRAMMARS), vocab=200)[list(GRAMMARS).index(name)]
    right = plain_answers()[name]
    HELD["start"] = [len(prompt)]
    HELD["drafts"] = {
        "right": right,
        "illegal id": [VOCAB + 5] * 50,
        "illegal token": [token if i % 3 else 0 for i, token in enumerate(right)],
        "past the end": [*right, *ids_of("more")],
        "nothing": [],
    }[wrong]
    with caplog.at_level(logging.WARNING):
        output = llm.generate(prompt, obeys(name))[0]
    assert output.outputs[0].token_ids == right
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "rror" not in capfd.readouterr().err
    spec = output.spec
    if wrong == "right":
        assert spec.num_spec_steps <= len(right) / (K + 1) + 1, "the grammar costs no acceptance"
    if wrong == "illegal id":
        assert (spec.num_draft_tokens, spec.num_accepted_draft_tokens) == (K * (len(right) - 1), 0), "B60: all counted"


@pytest.mark.parametrize("place", range(1, 7))
def test_b31_the_grammar_begins_right_behind_the_end_of_reasoning_wherever_that_is_in_a_block(place):
    """The target thinks `place` tokens, and the drafter, which knows that, goes on with a code fence."""
    llm = structured("scripted", logits_processors=("parameters:Only",))
    prompt = prompts(3, vocab=200)[2]
    bias = {EOS: -100, THINK_END: -100}
    thought = llm.generate(prompt, greedy(place, logit_bias=bias), speculation=False)[0].outputs[0].token_ids
    HELD["start"] = [len(prompt)]
    HELD["drafts"] = [*thought, THINK_END, *ids_of("```json")]
    params = greedy(
        40,
        logit_bias=bias,
        extra_args={"only_token": THINK_END, "only_after": place, "only_until": place + 1},
        structured_outputs={"choice": ["yes", "no"], "after_token_id": THINK_END},
        logprobs=0,
    )
    output = llm.generate(prompt, params)[0]
    ids = output.outputs[0].token_ids
    assert ids[: place + 1] == [*thought, THINK_END]
    assert ids[place + 1 :] in ([*ids_of("yes"), EOS], [*ids_of("no"), EOS])
    assert len(output.outputs[0].logprobs) == len(ids)
    assert output.spec.num_accepted_draft_tokens >= place - 1, "the thought was drafted right"


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"json": '{"type": '}, r"structured_outputs\.json cannot be used: Expecting value"),
        ({"json": {"type": "nope"}}, r"structured_outputs\.json cannot be used: Unsupported type"),
        ({"regex": "(a"}, r"structured_outputs\.regex cannot be used: .*not closed"),
        ({"grammar": "root ::= foo"}, r'structured_outputs\.grammar cannot be used: .*"foo" is not defined'),
        ({"structural_tag": {"a": 1}}, r"structured_outputs\.structural_tag cannot be used"),
        ({"regex": "a", "after_token_id": VOCAB}, f"after_token_id is {VOCAB}; this model's ids are 0 to {VOCAB - 1}"),
    ],
)
def test_a_grammar_that_says_nothing_is_refused_with_the_reason(grammar, message):
    llm = structured()
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2], SamplingParams(structured_outputs=grammar))
    assert_all_free(llm)


def test_a_grammar_needs_a_tokenizer_and_an_end():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine().generate([1], SamplingParams(structured_outputs={"regex": "a"}))
    endless = engine(tiny_model("endless", words="w"), enforce_eager=True)
    with pytest.raises(RequestError, match="end-of-sequence token"):
        endless.generate([1], SamplingParams(structured_outputs={"regex": "a"}))


def test_without_xgrammar_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"draftloop\[grammar\]"):
        structured().generate([1], SamplingParams(structured_outputs={"regex": "never compiled"}))


def test_parameters_that_leave_no_token_end_the_request_saying_so():
    params = SamplingParams(temperature=0, structured_outputs={"regex": "a+"}, allowed_token_ids=ids_of("b"))
    outputs = structured("self_draft").generate([[1, 2], [3]], [params, greedy(5)])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "parameters leave none" in outputs[0].error
    assert outputs[1].outputs[0].finish_reason == "length"


# ---- compiling ------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_nobody_waits_for_that_of_another(monkeypatch):
    from draftloop.sampling.grammar import GrammarCompiler

    llm = make_engine(target(), max_num_seqs=2, enforce_eager=True)
    compiled, go_on = [], threading.Event()
    compile_one = GrammarCompiler._compile

    def slowly(self, grammar):
        compiled.append(grammar)
        go_on.wait()
        return compile_one(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", slowly)
    core, ended = llm.engine.core, []
    for name in ("a", "b"):
        core.add(name, [1, 2], greedy(30, structured_outputs={"choice": ["yes"]}))
    core.add("free", [3, 4], greedy(5))
    while len(ended) < 3:
        ended += [sequence.request_id for sequence, _ in core.step() if sequence.finish_reason]
        if "free" in ended:
            go_on.set()
    assert ended[0] == "free"
    assert set(ended) == {"a", "b", "free"}
    assert len(compiled) == 1
    core.add("gone", [1, 2], greedy(5, structured_outputs={"choice": ["other"]}))
    core.abort("gone")
    assert core.idle
    llm.close()


def test_a_grammar_that_fails_between_a_look_at_it_and_the_plan_ends_its_request_alone(monkeypatch):
    """Compiling ends in another thread, at any moment."""
    from draftloop.sampling.grammar import GrammarCompiler

    fail_now = threading.Event()

    def fail(self, grammar):
        fail_now.wait(10)
        raise RuntimeError("no room for it")

    monkeypatch.setattr(GrammarCompiler, "_compile", fail)
    llm = make_engine(target(), max_num_seqs=2, enforce_eager=True)
    core, ended = llm.engine.core, {}
    bad = core.add("bad", [1], greedy(5, structured_outputs={"regex": "b+"}))
    look = core._next_plan

    def plan():
        fail_now.set()
        bad.grammar.wait()
        return look()

    monkeypatch.setattr(core, "_next_plan", plan)
    core.add("good", [2], greedy(5))
    while len(ended) < 2:
        ended |= {sequence.request_id: sequence.finish_reason for sequence, _ in core.step() if sequence.finish_reason}
    assert ended == {"bad": "error", "good": "length"}
    assert bad.output_ids == []
    llm.close()


def test_a_grammar_that_fails_to_compile_ends_its_request_alone(monkeypatch):
    from draftloop.sampling.grammar import GrammarCompiler

    def fail(self, grammar):
        raise RuntimeError("[01:02:03] /a/b.cc:12: no room for it")

    llm = make_engine(target(), max_num_seqs=2, enforce_eager=True)
    monkeypatch.setattr(GrammarCompiler, "_compile", fail)
    outputs = llm.generate([[1], [2]], [greedy(5, structured_outputs={"regex": "b+"}), greedy(5)])
    assert outputs[0].error == "structured_outputs could not be compiled: no room for it"
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    llm.close()
