"""Caches of 8-bit floats (e4m3): each kernel against the values that the cache holds, and a whole engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attention_cases import Case, backend, make
from torch import Tensor

from draftloop import LLM
from draftloop.bench.acceptance import measure_acceptance, shares_accepted
from draftloop.bench.prompts import load_prompts
from draftloop.errors import ConfigError
from draftloop.kernels.fp8_cache import FP8, FP8_MAX, to_cache
from draftloop.kernels.rope_write import rope_write_torch, rope_write_triton
from example_drafters import example_configs
from helpers import answering, answers, assert_all_free, engine, greedy, make_engine, prompts, tiny_model
from loading import change
from quantized import quantised_copy

CASE = Case(lens=[(1, 40), (4, 37), (3, 3)], heads=4, kv_heads=2, head_dim=64, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_attention_reads_what_the_cache_holds(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Within rounding what the same backend makes of the same numbers in the model's dtype."""
    if (name, device.type, dtype) == ("triton", "cpu", torch.bfloat16):
        dtype = torch.float16  # numpy, and so the interpreter, multiplies no bf16
    q, kv, batch, _ = make(CASE, device, dtype)
    held = to_cache(kv, FP8)
    made = backend(name, CASE, device, dtype)
    outs = []
    for cache in (held, held.to(dtype)):
        out = torch.empty_like(q)
        made.attend(q, cache, batch, out, sliding_window=None)
        outs.append(out)
    assert outs[0].isfinite().all()
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5 if dtype is torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [rope_write_torch, rope_write_triton])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_keys_and_values_are_rounded_to_the_nearest_and_cut(
    run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, rotary_dim: int
) -> None:
    torch.manual_seed(0)
    qkv = (torch.randn(5, 8 * 64, device=device) * 3).to(dtype)
    angles = torch.rand(20, rotary_dim // 2, device=device)
    angles[0] = 0
    if run is rope_write_triton and device.type == "cpu":
        # Triton's interpreter loses the carry of a mantissa that is rounded up: give it what e4m3 holds
        qkv, angles = to_cache(qkv, FP8).to(dtype), torch.zeros_like(angles)
    qkv[0, 4 * 64 :] = 900.0  # more than e4m3 holds
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([0, 3, 4, 5, 6], device=device)
    slots = torch.tensor([16, 17, 40, 41, 47], device=device)
    caches = [torch.zeros(2, 3, 16, 2, 64, device=device).to(kind) for kind in (dtype, FP8)]
    queries = [run(qkv, positions, slots, cos_sin, cache, num_heads=4, num_kv_heads=2, head_dim=64) for cache in caches]
    assert torch.equal(*queries)
    exact, held = (cache.flatten(1, 2)[:, slots].float() for cache in (caches[0], caches[1].to(dtype)))
    assert held[:, 0].max() == FP8_MAX
    # 3 bits of mantissa: 2**-4 of the value, or half of the smallest step
    torch.testing.assert_close(held, exact.clamp(-FP8_MAX, FP8_MAX), rtol=2**-4 + 1e-3, atol=2**-10)
    assert (caches[1].view(torch.uint8).flatten(1, 2)[:, [0, 18, 46]] == 0).all()


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "gemma4_mtp", "ngram"])
def test_text_is_the_same_with_and_without_speculation(method: str, device_name: str) -> None:
    """In every mode of reuse: cold, found in the prefix cache, and after a preemption; with poison."""
    spec = example_configs()[method][-1]
    llm = engine(speculative_config=spec, kv_cache_dtype="fp8", device=device_name, dtype="float32", poison=True)
    core, asked = llm.engine.core, prompts(5, longest=40)
    assert llm.engine.pool.caches[0].dtype is FP8
    plain = answers(llm.generate(asked, greedy(20), speculation=False))
    llm.reset_prefix_cache()
    for _ in range(2):
        assert answers(llm.generate(asked, greedy(20))) == plain
    sequences = [core.add(str(i), prompt, greedy(20)) for i, prompt in enumerate(asked)]
    step = 0
    while not core.idle:
        core.step()
        core.preempt(str(step % 5))
        step += 1
    assert [sequence.output_ids for sequence in sequences] == plain
    assert_all_free(llm)


@pytest.mark.gpu
def test_the_shipped_head_is_accepted_as_often_beside_an_8_bit_cache() -> None:
    """B49: within 5 %, over the first turns of MT-bench."""
    spec = {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 5}
    lengths = {}
    for dtype in ("auto", "fp8"):
        llm = LLM("smollm2-135m", device="cuda", max_model_len=1024, speculative_config=spec, kv_cache_dtype=dtype)
        assert llm.engine.pool.caches[1].dtype is torch.bfloat16
        asked = {"mt_bench": load_prompts("mt_bench")}
        found = measure_acceptance(llm, asked, max_tokens=96, temperature=0, show_progress=False)
        lengths[dtype] = 1 + sum(shares_accepted([answer.histogram for answer in found]))
        llm.close()
    assert lengths["fp8"] >= 0.95 * lengths["auto"], lengths


def test_the_drafter_keeps_its_own_type_and_says_what_it_says_without_an_8_bit_target() -> None:
    """B49: every draft beside an 8-bit target is that of the same model alone, in float32."""
    spec = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
    llm = make_engine(speculative_config=spec, kv_cache_dtype="fp8")
    assert [cache.dtype for cache in llm.engine.pool.caches] == [FP8, torch.float32]
    core, drafts_MK = llm.engine.core, llm.engine.core.worker.state.drafts_MK
    known, drafted = [], []
    for i, prompt in enumerate(prompts(4, longest=40)):
        core.add(str(i), prompt, greedy(16))
    while not core.idle:
        core.step()
        for sequence in answering(core):
            known.append(sequence.token_ids)
            drafted.append(drafts_MK[sequence.row].tolist())
    assert len(drafted) > 15
    assert answers(engine(dtype="float32").generate(known, greedy(3))) == drafted
    assert 2.5 < llm.get_metrics()["mean_acceptance_length"] < 4.0, "the rounded target parts from the drafter at times"
    llm.close()


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_long_context_is_verified_alike_in_every_mode(kv_cache_dtype: str, device_name: str) -> None:
    """B15: 1,500 tokens and more, where keys are read in many splits; logprobs, tokens and accepted drafts."""
    model, draft = (tiny_model(f"long-{noise}", noise=noise, max_len=1600) for noise in (0.0, 0.06))
    spec = {"model": draft, "num_speculative_tokens": 3}
    (prompt,) = prompts(1, longest=4)
    asked = [(prompt * 400)[:1500], (prompt * 400)[:1431]]
    found = {}
    for mode in ("NONE", "PIECEWISE", "FULL"):
        llm = make_engine(
            model, speculative_config=spec, cudagraph_mode=mode, kv_cache_dtype=kv_cache_dtype, max_model_len=1600,
            max_num_batched_tokens=512, max_num_seqs=2, dtype="float32", device=device_name,
        )  # fmt: skip
        outputs = llm.generate(asked, greedy(24, logprobs=0))
        values = [next(iter(top.values())).logprob for output in outputs for top in output.outputs[0].logprobs]
        found[mode] = answers(outputs), [output.spec.acceptance_histogram for output in outputs], torch.tensor(values)
        llm.close()
    for mode in ("PIECEWISE", "FULL"):
        assert found[mode][:2] == found["NONE"][:2]
        torch.testing.assert_close(found[mode][2], found["NONE"][2], atol=1e-4, rtol=0)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp4'"):
        make_engine(kv_cache_dtype="fp4")


def with_cache_scales(folder: Path, value: float) -> str:
    copy, _ = quantised_copy(tiny_model(), folder, "compressed fp8 per tensor, static")
    change(copy, **{f"model.layers.0.self_attn.{name}_scale": torch.tensor([value]) for name in "kv"})
    return str(copy)


def test_scales_in_a_checkpoint_are_not_needed_by_a_wider_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="draftloop"):
        make_engine(with_cache_scales(tmp_path, 0.5)).close()
    assert "2 scales of an 8-bit cache are not needed: the cache is torch.float32" in caplog.text


def test_scales_in_a_checkpoint_other_than_one_are_refused(tmp_path: Path) -> None:
    folder = with_cache_scales(tmp_path, 0.5)
    with pytest.raises(ConfigError, match=r"self_attn\.k_scale is 0\.5, .* leave kv_cache_dtype at auto"):
        make_engine(folder, kv_cache_dtype="fp8")


def test_scales_in_a_checkpoint_of_one_are_taken(tmp_path: Path) -> None:
    llm = make_engine(with_cache_scales(tmp_path, 1.0), kv_cache_dtype="fp8")
    assert len(answers(llm.generate(prompts(1), greedy(4)))[0]) == 4
    llm.close()
