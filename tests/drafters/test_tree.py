"""Trees of drafts in the engine: against a reference in plain torch after every step, and against plain decoding.

What all drafters must keep is asked of an `eagle3` tree too, by test_all_drafters.py.
"""

from __future__ import annotations

import pytest
import torch
from eagle_reference import Reference, hf_model, hf_states

from draftloop.config.draft_tree import DraftTree, parse_choices
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from draftloop.sampling.accept_tree import TreeTables
from heads import head_config, head_weights, mtp_target, step_by_step, tiny_head, wide_config, wide_head
from helpers import (
    answering,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)
from trees import SIXTEEN, Knowing

SMALL = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0)]"
TREES = {
    "small": SMALL,
    "sixteen": SIXTEEN,
    "wide": "[(0,), (1,), (2,), (3,), (4,)]",
    "one deep branch": "[(0,), (1,), (1, 0), (1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0, 0)]",
}


def shape(text: str) -> DraftTree:
    return DraftTree.of_choices(parse_choices(text))


def spec(text: str, *, method: str = "eagle3", **others) -> dict:
    head = tiny_head("eagle3") if method == "eagle3" else tiny_head("eagle", method="eagle")
    return {"method": method, "model": head, "speculative_token_tree": text, **others}


def forced(length: float = 3.0) -> dict:
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


@torch.no_grad()
def reference_tree(other: Reference, tokens: list[int], aux: torch.Tensor, tree: DraftTree) -> list[int]:
    """The likeliest tokens behind each place, each branch run by itself."""
    drafts: list[int] = []
    for place in range(tree.num_places):
        if not tree.num_children[place]:
            continue
        hidden = other.fuse(aux[: len(tokens) - 1]) if other.config.method == "eagle3" else aux[: len(tokens) - 1]
        ids = list(tokens[1:])
        recycled, logits = other.run(torch.tensor(ids), hidden)
        for behind in tree.paths[place][1:]:
            hidden, ids = torch.cat([hidden, recycled[-1:]]), [*ids, drafts[behind - 1]]
            recycled, logits = other.run(torch.tensor(ids), hidden)
        drafts += other.target_ids()[logits[-1].topk(tree.num_children[place]).indices].tolist()
    return drafts


@pytest.fixture(params=["first children", "last children"])
def children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which children stand where acceptance is by coin."""
    if request.param == "last children":
        make = TreeTables.of

        def last(tree: DraftTree, device: torch.device) -> TreeTables:
            behind = [
                [c for c in range(1, tree.num_places) if tree.parents[c - 1] == p] for p in range(tree.num_places)
            ]
            made = make(tree, device)
            return made._replace(children_Q=torch.tensor([b[-1] if b else -1 for b in behind], dtype=torch.int32))

        monkeypatch.setattr(TreeTables, "of", last)
    return request.param


@pytest.mark.parametrize(("name", "method"), [("small", "eagle3"), ("sixteen", "eagle3"), ("small", "eagle")])
def test_the_tree_is_the_reference_s_after_every_step(name, method, children):
    """Blocks end at any height, on branches that the target never liked; prompts come in chunks. What is drafted next
    must depend on the tokens alone, so both caches must hold what a chain would have left."""
    tree, config = shape(TREES[name]), head_config(method)
    llm = make_engine(
        speculative_config=spec(TREES[name], method=method, **forced(1 + 0.6 * tree.depth)),
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=(2, 8),
        max_num_batched_tokens=64,
    )
    llm.engine.table.poison = True
    core, state = llm.engine.core, llm.engine.core.worker.state
    tables = hf_model(tiny_model())
    other = Reference(config, head_weights(config), tables.model.embed_tokens.weight, tables.lm_head.weight)
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(10))
    lengths = set()

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            streams, final = hf_states(tiny_model(), tokens)
            aux = final if method == "eagle" else torch.cat([streams[i] for i in config.layer_ids or ()], -1)
            assert state.drafts_MK[sequence.row].tolist() == reference_tree(other, tokens, aux, tree)
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert len(lengths) >= 2, "blocks end at several heights"
    assert_all_free(llm)
    llm.close()


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "FULL_DECODE_ONLY") for name in TREES), ("small", "NONE"), ("small", "PIECEWISE")],
)
def test_text_is_that_of_the_plain_engine_whichever_branch_is_accepted(monkeypatch, name, mode):
    tree, knowing = shape(TREES[name]), Knowing(monkeypatch)
    llm = knowing.watch(
        make_engine(speculative_config=spec(TREES[name]), cudagraph_mode=mode, cudagraph_capture_sizes=(2, 8))
    )
    asked = prompts(7)
    for prompt in asked:
        knowing.texts[tuple(prompt)] = oracle(prompt, 64)
    for poison in (False, True):
        llm.engine.table.poison = poison
        outputs = llm.generate(asked, greedy(24))
        assert answers(outputs) == [oracle(prompt, 24) for prompt in asked]
        assert_all_free(llm)
    assert llm.get_metrics()["mean_acceptance_length"] > 1 + 0.3 * tree.depth
    llm.close()


@pytest.mark.parametrize("options", [{}, {"iteration_graph": True}, {"device_loop": 8}], ids=str)
def test_lengths_and_limits_of_long_branches(monkeypatch, options):
    """Rows that end, by their limit or the model's, inside a branch; steps alone, whole, and repeated by the device."""
    knowing = Knowing(monkeypatch)
    llm = knowing.watch(
        make_engine(speculative_config=spec(SIXTEEN), max_model_len=48, cudagraph_capture_sizes=(2, 8), **options)
    )
    llm.engine.table.poison = True
    asked = [prompt for prompt in prompts(8, longest=47) if len(prompt) < 48]
    for prompt in asked:
        knowing.texts[tuple(prompt)] = oracle(prompt, 64)
    outputs = llm.generate(asked, greedy(None))
    for prompt, output in zip(asked, outputs, strict=True):
        assert len(prompt) + len(output.outputs[0].token_ids) == 48
        assert output.outputs[0].token_ids == oracle(prompt, 48, max_model_len=48)
    counts = range(1, 12)
    outputs = llm.generate([asked[0]] * len(counts), [greedy(n) for n in counts])
    assert answers(outputs) == [oracle(asked[0], n) for n in counts]
    report = llm.get_graph_report()
    if "device_loop" in options:
        assert sum(row.iterations for row in report.loops) > 0
    if options:
        assert sum(row.replays for row in report.rows if row.phase == "iteration") > 0
    assert_all_free(llm)
    llm.close()


@pytest.mark.parametrize("options", [{}, {"iteration_graph": True, "device_loop": 4}], ids=str)
def test_a_seed_says_what_it_says_without_speculation(options):
    llm = engine(speculative_config=spec(SMALL), cudagraph_capture_sizes=(2, 8), **options)
    asked = prompts(4)
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=20),
        greedy(20),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5, max_tokens=20),
        SamplingParams(temperature=1.4, min_p=0.05, seed=7, max_tokens=20),
    ]
    assert answers(llm.generate(asked, params)) == answers(llm.generate(asked, params, speculation=False))


def test_the_report_names_every_phase_and_all_of_them_are_graphs():
    llm = engine(speculative_config=spec(SMALL), cudagraph_mode="FULL", require_graphs=True, iteration_graph=True)
    llm.engine.table.poison = False
    llm.generate(prompts(3), greedy(8))
    report = llm.get_graph_report()
    phases = {row.phase for row in report.rows}
    assert {"target.compact", "draft.decode.1", "draft.decode.2", "iteration"} <= phases
    assert "draft.decode" not in phases
    assert llm.engine.table.uncovered() == {}
    parts = [part.name for part in llm.engine.table.phases["iteration"].parts]
    assert parts == ["target.verify", "accept", "target.compact", "draft.prefill", "draft.decode.1", "draft.decode.2"]
    assert "tree of 7 drafts (2, 3, 2 by height)" in llm.engine.drafter.describe()


def test_a_tree_without_branches_runs_as_the_chain_that_it_is():
    chain = spec("[(0,), (0, 0), (0, 0, 0)]")
    llm = engine(speculative_config=chain)
    assert llm.engine.drafter.num_drafts == 3
    assert not {"target.compact", "draft.decode.1"} & llm.engine.table.phases.keys()
    assert llm.engine.drafter.sampled, "a chain's drafts may be drawn"


def test_rows_past_the_head_s_own_length_draft_nothing_and_go_on():
    """Drafts of each height stop where the position would; none of them is left behind one that is missing."""
    short = tiny_head("eagle3-30", head_config(max_len=30))
    llm = engine(speculative_config=spec(SMALL) | {"model": short}, poison=True, cudagraph_mode="FULL")
    core, tree, prompt = llm.engine.core, shape(SMALL), prompts(3)[1]
    core.add("0", prompt, greedy(40))
    seen = set()

    def check() -> None:
        for sequence in answering(core):
            length = sequence.num_tokens
            drafts = core.worker.state.drafts_MK[sequence.row].tolist()
            there = [height + length - 1 < 30 for height in tree.heights[1:]]
            assert [draft >= 0 for draft in drafts] == there
            seen.add(sum(there))

    assert run_through(llm, check) == {"0": oracle(prompt, 40)}
    assert {0, 7} < seen


def test_acceptance_by_coin_has_the_length_that_was_asked_for():
    llm = engine(speculative_config=spec(SIXTEEN, **forced(3.5)), max_num_batched_tokens=256)
    llm.generate(prompts(7), greedy(60, ignore_eos=True))
    assert llm.get_metrics()["mean_acceptance_length"] == pytest.approx(3.5, abs=0.4)


# ---- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_backend": "flashinfer"}, "attention backend flashinfer has no mask for trees"),
        ({"method": "mtp", "model": None}, "speculative method 'mtp' does not use 'speculative_token_tree'"),
        ({"parallel_drafting": True}, "speculative method 'peagle' does not use 'speculative_token_tree'"),
        ({"speculative_token_tree": [[rank] for rank in range(13)]}, "has 13 drafts behind one place"),
    ],
)
def test_what_cannot_draft_a_tree_says_why(change, message):
    config = head_config(draft_vocab_size=12)
    settings = {**spec(SMALL), "model": tiny_head("eagle3-12", config), **change}
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        make_engine(mtp_target("deepseek"), speculative_config=settings)


def test_a_target_s_attention_must_take_trees():
    with pytest.raises(ConfigError, match="attention backend flashinfer has no mask for trees"):
        make_engine(speculative_config=spec(SMALL), attention_backend="flashinfer")


# ---- devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_reference_holds_on_each_device(device):
    """A head that every kernel takes. On a GPU, sums in another order may tip a close choice."""
    folder, config, tree = tiny_model("wide", hidden=256), wide_config("eagle3"), shape(SIXTEEN)
    llm = step_by_step(
        folder, device, {**spec(SIXTEEN, **forced()), "model": wide_head("eagle3")}, max_num_batched_tokens=128
    )
    core, state = llm.engine.core, llm.engine.core.worker.state
    tables = hf_model(folder)
    other = Reference(config, head_weights(config), tables.model.embed_tokens.weight, tables.lm_head.weight)
    same = []
    for prompt in prompts(3):
        core.add("0", prompt, greedy(12))
        while not core.idle:
            core.step()
            for sequence in core.scheduler.running:
                tokens = sequence.token_ids
                streams, _ = hf_states(folder, tokens)
                aux = torch.cat([streams[i] for i in config.layer_ids or ()], -1)
                ours = state.drafts_MK[sequence.row].tolist()
                wanted = reference_tree(other, tokens, aux, tree)
                same += [one == two for one, two in zip(ours, wanted, strict=True)]
    assert len(same) > 10 * tree.num_drafts
    assert sum(same) >= (0.8 if device == "cuda" else 1.0) * len(same)
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_is_the_same_in_every_mode_on_a_gpu(dtype):
    """Steps alone, whole, and repeated by the device: bit for bit; in fp32 also that of plain decoding."""

    def texts(**options) -> list[list[int]]:
        llm: LLM = make_engine(
            tiny_model("wide", hidden=256), device="cuda", dtype=dtype, cudagraph_capture_sizes=(2, 8),
            max_num_batched_tokens=128, **options,
        )  # fmt: skip
        llm.engine.table.poison = True
        found = answers(llm.generate(prompts(7), greedy(40)))
        sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=40, frequency_penalty=0.3)
        found += answers(llm.generate(prompts(3), sampled))
        llm.close()
        return found

    tree = {"speculative_config": {**spec(SIXTEEN), "model": wide_head("eagle3")}}
    first = texts(**tree, cudagraph_mode="NONE")
    for options in (
        {"cudagraph_mode": "PIECEWISE"},
        {"iteration_graph": False},
        {"device_loop": "off"},
        {"device_loop": 64},
    ):
        assert texts(**tree, **options) == first, options
    if dtype == "float32":
        assert texts()[:7] == first[:7]
