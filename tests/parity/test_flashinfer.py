"""How FlashInfer is called: planned once per pass, by lengths of the moment, through wrappers of a fixed size.

Without a GPU a fake takes its place, which computes attention from what was planned and nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCE, Case, backend, make

import fake_flashinfer
from draftloop.attention.base import AttentionShape
from draftloop.attention.flashinfer import FlashinferBackend
from draftloop.errors import ConfigError, GraphError
from fake_flashinfer import EVENTS, BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from helpers import answers, greedy, make_engine, near_draft, oracle, prompts, tiny_model

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0, page_size=16, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


def fake_backend(case: Case) -> FlashinferBackend:
    made = backend("flashinfer", case, CPU, torch.float32)
    assert isinstance(made, FlashinferBackend)
    return made


def names() -> list[str]:
    return [name for name, _ in EVENTS]


# ---- plans ----------------------------------------------------------------------------------


def test_a_pass_over_many_layers_is_planned_once() -> None:
    case = Case(lens=((3, 35), (3, 0), (3, 20)), uniform=True)
    q, kv, batch, expected = make(case, CPU, torch.float32)
    layers = [kv.clone() for _ in range(4)]
    flashinfer = fake_backend(case)
    for _ in range(2):  # the same batch object again, as a replay of captured segments passes it
        for layer in layers:
            out = torch.full_like(q, float("nan"))
            flashinfer.attend(q, layer, batch, out, sliding_window=None)
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert names() == ["make", *(["plan"] + ["run"] * 4) * 2]


def test_each_pass_is_planned_by_the_lengths_of_the_moment() -> None:
    case = Case(lens=((2, 35), (2, 20)), uniform=True)
    q, kv, batch, expected = make(case, CPU, torch.float32)
    flashinfer, lens = fake_backend(case), batch.kv_lens_R.clone()
    batch.kv_lens_R.zero_()  # as while phases are captured: all rows are padding
    out = torch.full_like(q, float("nan"))
    flashinfer.attend(q, kv, batch, out, sliding_window=None)
    assert out.eq(0).all()
    batch.kv_lens_R.copy_(lens)
    flashinfer.attend(q, kv, batch, out, sliding_window=None)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_another_batch_in_between_does_not_leave_its_plan_behind() -> None:
    """Two phases of one size share a wrapper; each pass plans it anew."""
    flashinfer = None
    for seed in (1, 2, 1):
        case = Case(lens=((2, 20 + seed), (2, 30)), uniform=True, seed=seed)
        q, kv, batch, expected = make(case, CPU, torch.float32)
        flashinfer = flashinfer or fake_backend(case)
        out = torch.empty_like(q)
        flashinfer.attend(q, kv, batch, out, sliding_window=None)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert Counter(names()) == {"make": 1, "plan": 3, "run": 3}


def test_layers_with_and_without_a_window_have_a_wrapper_each() -> None:
    case = Case(lens=((2, 35), (2, 20)), uniform=True)
    q, kv, batch, _ = make(case, CPU, torch.float32)
    layers = [kv.clone() for _ in range(4)]
    flashinfer = fake_backend(case)
    for layer, window in zip(layers, (5, None, 5, None), strict=True):
        flashinfer.attend(q, layer, batch, torch.empty_like(q), sliding_window=window)
    assert Counter(names()) == {"make": 2, "plan": 2, "run": 4}
    used = [wrapper for name, wrapper in EVENTS if name == "run"]
    assert used[0] is used[2]
    assert used[1] is used[3]
    assert [wrapper.planned["window_left"] for wrapper in used[:2]] == [4, -1]
    assert used[0].schedule is not used[1].schedule, "both schedules are needed until the pass is over"


def test_what_is_planned_for_a_uniform_batch_with_a_padding_row() -> None:
    case = Case(lens=((3, 33), (3, 16), (3, 0), (3, 5)), uniform=True)
    q, kv, batch, _ = make(case, CPU, torch.float32)
    fake_backend(case).attend(q, kv, batch, torch.empty_like(q), sliding_window=None)
    planned = EVENTS[-1][1].planned
    assert planned["qo_indptr"].tolist() == [0, 3, 6, 9, 12]
    assert planned["indptr"].tolist() == [0, 3, 4, 4, 5]
    assert planned["last_page_len"].tolist() == [1, 16, 0, 5]
    pages = batch.page_table_MN[batch.rows_R.long()].tolist()
    assert planned["indices"].tolist() == [*pages[0][:3], pages[1][0], pages[3][0]]
    assert planned["heads"] == (4, 2, 64, 16)
    assert planned["causal"] is True


def test_what_is_planned_for_a_ragged_batch() -> None:
    """Tokens past the last row's are cut off: FlashInfer refuses more queries than it planned."""
    case = Case(lens=((1, 17), (0, 0), (4, 4)), padding=3)
    q, kv, batch, expected = make(case, CPU, torch.float32)
    out = torch.full_like(q, float("nan"))
    fake_backend(case).attend(q, kv, batch, out, sliding_window=None)
    planned = EVENTS[-1][1].planned
    assert planned["qo_indptr"].tolist() == [0, 1, 1, 5]
    assert planned["indptr"].tolist() == [0, 2, 2, 3]
    assert planned["last_page_len"].tolist() == [1, 0, 4]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_batch_of_nothing_but_padding_compiles_and_runs_nothing() -> None:
    """While prompts are warmed up there is no token: the plan loads the kernels, the run would have nothing to do."""
    case = Case(lens=((0, 0), (0, 0)), padding=4)
    q, kv, batch, _ = make(case, CPU, torch.float32)
    out = torch.full_like(q, float("nan"))
    fake_backend(case).attend(q, kv, batch, out, sliding_window=None)
    assert names() == ["make", "plan"]
    assert out.eq(0).all()


# ---- wrappers -------------------------------------------------------------------------------


def test_wrappers_are_keyed_by_rows_and_query_length() -> None:
    flashinfer = fake_backend(Case(lens=((1, 1),)))
    for lens in (((3, 9),) * 2, ((3, 7),) * 2, ((3, 9),) * 4, ((2, 9),) * 2, ((1, 9),) * 2):
        q, kv, batch, _ = make(Case(lens=lens, uniform=True), CPU, torch.float32)
        flashinfer.attend(q, kv, batch, torch.empty_like(q), sliding_window=None)
    made = [wrapper for name, wrapper in EVENTS if name == "make"]
    assert [(type(w), w.fixed_rows) for w in made] == [
        (BatchPrefillWithPagedKVCacheWrapper, 2),
        (BatchPrefillWithPagedKVCacheWrapper, 4),
        (BatchPrefillWithPagedKVCacheWrapper, 2),
        (BatchDecodeWithPagedKVCacheWrapper, 2),
    ], "one token per row is the decode wrapper's, and nothing else is (B13)"


def test_ragged_batches_of_all_sizes_share_a_wrapper_that_is_not_in_graph_mode() -> None:
    flashinfer = fake_backend(Case(lens=((1, 1),)))
    for lens in (((3, 9), (1, 5)), ((20, 20),), ((1, 1), (2, 30), (3, 3))):
        q, kv, batch, _ = make(Case(lens=lens), CPU, torch.float32)
        flashinfer.attend(q, kv, batch, torch.empty_like(q), sliding_window=None)
    (made,) = [wrapper for name, wrapper in EVENTS if name == "make"]
    assert not made.use_cuda_graph


def big_backend(monkeypatch: pytest.MonkeyPatch, num_sms: int = 132) -> FlashinferBackend:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    made = FlashinferBackend(SHAPE, CPU)
    made.num_sms = num_sms
    return made


def test_128_rows_get_more_than_the_usual_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's recommended 256 MiB overflow there; its scheduler asks for 151 blocks of 128 x 128 sums per head."""
    made = big_backend(monkeypatch)
    assert made._grid(128, 6) == (151, 128)
    assert made.workspace_bytes(128, 6) >= 32 * 151 * 128 * (128 + 1) * 4 > 256 << 20
    assert made._grid(1, 1) == (33, 16)
    assert made._grid(4, 6) == (33, 128)
    sizes = [made.workspace_bytes(rows, 6) for rows in (1, 8, 32, 128, 256)]
    assert sizes == sorted(sizes)


def test_the_workspace_grows_and_every_wrapper_follows() -> None:
    flashinfer = fake_backend(Case(lens=((1, 1),)))
    small, large = ((2, 9),) * 2, ((9, 9),) * 400
    for lens in (small, large, small):
        q, kv, batch, expected = make(Case(lens=lens, uniform=True), CPU, torch.float32)
        out = torch.empty_like(q)
        flashinfer.attend(q, kv, batch, out, sliding_window=None)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        assert EVENTS[-1][1].workspace is flashinfer.workspace
    assert flashinfer.workspace.numel() >= flashinfer.workspace_bytes(400, 9) > flashinfer.workspace_bytes(2, 2)


# ---- refusals -------------------------------------------------------------------------------


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r"pip install 'draftloop\[cuda\]'"):
            FlashinferBackend.check(SHAPE, device)
    with pytest.raises(ConfigError, match=r"pip install 'draftloop\[cuda\]'"):
        make_engine(attention_backend="flashinfer")
    with pytest.raises(ConfigError, match=r"pip install 'draftloop\[cuda\]'"):
        make_engine(
            speculative_config={"model": near_draft(), "num_speculative_tokens": 2, "attention_backend": "flashinfer"}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head size 96; supported: 64, 128, 256"),
        ({"page_size": 8}, "page size 8"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"kv_dtype": torch.float16}, "cache dtype"),
        ({"soft_cap": 30.0}, "soft-capping of scores, here at 30.0"),
        ({"num_kv_heads": 5}, "do not divide"),
    ],
)
def test_shapes_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch, change: dict, message: str) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    FlashinferBackend.check(SHAPE, "cuda")
    with pytest.raises(ConfigError, match=message):
        FlashinferBackend.check(replace(SHAPE, **change), "cuda")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        FlashinferBackend.check(SHAPE, "cpu")


# ---- in the engine --------------------------------------------------------------------------

REASON = "flashinfer plans on the host from lengths that only the device knows"


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(FlashinferBackend, "check", classmethod(lambda cls, shape, device_type: None))


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_the_engine_answers_the_same_and_plans_once_per_forward_pass(mode: str, overlap: bool) -> None:
    spec = {"model": near_draft(), "num_speculative_tokens": 2, "attention_backend": "flashinfer"}
    llm = make_engine(
        attention_backend="flashinfer",
        speculative_config=spec,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=(2, 8),
        async_scheduling=overlap,
        max_num_batched_tokens=24,
    )
    EVENTS.clear()
    for poison in (False, True):
        llm.engine.table.poison = poison
        asked = prompts(5)
        assert answers(llm.generate(asked, greedy(16))) == [oracle(p, 16) for p in asked]
    counts = Counter(names())
    assert counts["run"] == 2 * counts["plan"], "the models have two layers"


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize(
    ("setting", "verify", "decode"), [("FULL_AND_PIECEWISE", "PIECEWISE", "NONE"), ("FULL_DECODE_ONLY", "NONE", "NONE")]
)
def test_the_report_says_what_was_asked_what_it_became_and_why(setting: str, verify: str, decode: str) -> None:
    """B08: FULL is not lowered in silence, and a machine can read it."""
    spec = {"model": near_draft(), "num_speculative_tokens": 2, "attention_backend": "flashinfer"}
    llm = make_engine(attention_backend="flashinfer", speculative_config=spec, cudagraph_mode=setting)
    llm.generate(prompts(2), greedy(8))
    report = llm.get_graph_report()
    phases = report.to_dict()["phases"]
    for phase, mode in (("target.verify", verify), ("draft.prefill", verify), ("draft.decode", decode)):
        assert phases[phase] == {"asked": "FULL", "mode": mode, "reason": REASON}
    assert phases["accept"] == {"asked": "FULL", "mode": "FULL", "reason": ""}
    for row in report.to_dict()["rows"]:
        if row["phase"] == "target.verify":
            assert (row["asked"], row["mode"], row["reason"]) == ("FULL", verify, REASON)
    (line,) = [line for line in report.format().splitlines() if line.startswith("target.verify ")]
    assert REASON in line
    assert verify in line


@pytest.mark.usefixtures("faked")
def test_required_graphs_refuse_it_where_full_is_all_that_was_asked_for() -> None:
    with pytest.raises(GraphError, match=f"not every phase is covered.*target.verify: {REASON}"):
        make_engine(attention_backend="flashinfer", cudagraph_mode="FULL", require_graphs=True,
                    speculative_config={"method": "ngram", "num_speculative_tokens": 2})  # fmt: skip


@pytest.mark.usefixtures("faked")
def test_each_model_may_have_its_own_backend() -> None:
    spec = {"model": near_draft(), "num_speculative_tokens": 2}
    for target, drafter in (("flashinfer", "sdpa"), ("sdpa", "flashinfer")):
        EVENTS.clear()
        llm = make_engine(attention_backend=target, speculative_config={**spec, "attention_backend": drafter})
        asked = prompts(3)
        assert answers(llm.generate(asked, greedy(12))) == [oracle(p, 12) for p in asked]
        assert EVENTS
        graphs = llm.get_graph_report().phases
        assert {name: graphs[name]["mode"] for name in ("target.verify", "draft.decode")} == {
            "target.verify": "NONE" if target == "flashinfer" else "FULL",
            "draft.decode": "NONE" if drafter == "flashinfer" else "FULL",
        }


# ---- FlashInfer itself ----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 3])
def test_nothing_that_an_earlier_pass_left_in_the_workspace_is_read(query_len: int) -> None:
    """B14: one captured replay of a batch of 2, its memory filled with ones, then with zeros: bit for bit the same."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    case = Case(lens=((query_len, 700), (query_len, 40)), heads=32, kv_heads=8, head_dim=128, uniform=True)
    q, kv, batch, expected = make(case, device, dtype)
    flashinfer = backend("flashinfer", case, device, dtype)
    assert isinstance(flashinfer, FlashinferBackend)
    out = torch.empty_like(q)
    flashinfer.attend(q, kv, batch, out, sliding_window=None)
    ((key, made),) = flashinfer._wrappers.items()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.wrapper.run(q, (kv[0], kv[1]), out=out)
    results = []
    for fill in (0xFF, 0x00):
        flashinfer.workspace.fill_(fill)
        made.schedule.fill_(fill)
        flashinfer._plan(key, flashinfer._begin(batch))
        out.fill_(float("nan"))
        graph.replay()
        results.append(out.clone())
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
def test_128_rows_of_six_tokens_run() -> None:
    """The size at which a workspace of 256 MiB overflows."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    lens = (*((6, 6 + 5 * row) for row in range(126)), (6, 0), (6, 0))
    case = Case(lens=lens, heads=32, kv_heads=8, head_dim=128, uniform=True)
    q, kv, batch, _ = make(case, device, dtype)
    outs = {}
    for name in ("triton", "flashinfer"):
        outs[name] = torch.full_like(q, float("nan"))
        backend(name, case, device, dtype).attend(q, kv, batch, outs[name], sliding_window=None)
    torch.testing.assert_close(outs["flashinfer"], outs["triton"], atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_the_engine_says_what_it_says_with_triton(mode: str) -> None:
    """Between captured segments and eager, for both models, poisoned. Sums differ in order, so a token may flip."""
    pytest.importorskip("flashinfer", reason="flashinfer is not installed", exc_type=ImportError)
    texts = {}
    for name in ("triton", "flashinfer"):
        spec = {"model": tiny_model("wide-near", hidden=256, noise=0.06), "num_speculative_tokens": 3}
        llm = make_engine(
            tiny_model("wide", hidden=256),
            device="cuda",
            dtype="float16",
            attention_backend=name,
            speculative_config={**spec, "attention_backend": name},
            cudagraph_mode=mode,
            cudagraph_capture_sizes=(2, 8),
        )
        llm.engine.table.poison = True
        texts[name] = answers(llm.generate(prompts(7), greedy(16)))
        if name == "flashinfer":
            assert llm.engine.resolved.pipeline_depth == 1
            phases = llm.get_graph_report().phases
            assert phases["target.verify"]["mode"] == ("PIECEWISE" if mode == "FULL_AND_PIECEWISE" else "NONE")
        llm.close()
    same = sum(a == b for one, other in zip(*texts.values(), strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.7 * 7 * 16
