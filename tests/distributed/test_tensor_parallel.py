"""Two ranks say what one says, token for token, whatever drafts; and end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftloop.config.engine import EngineConfig
from draftloop.distributed.group import ALONE
from draftloop.distributed.launcher import Ranks
from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine.follower import gather
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError, RankError
from draftloop.models.loader import load_config, load_model, resolve_model
from draftloop.models.shards import why_not_divided
from draftloop.request import SamplingParams
from example_drafters import example_configs, works_on_host
from experts import tiny_experts
from gemma4 import gemma4_target
from helpers import VOCAB, answers, drafting_spec, engine, greedy, make_engine, prompts, tiny_model
from quantized import FORMATS, quantised_copy
from ranks import moves, on_nodes, watchdog

load_drafters()

TELLING = ("eagle3", "draft_model", "mtp", "dflash")
CASES = [  # the telling ones first, like all tests here: time on several GPUs ends soon
    pytest.param(name, index, id=f"{name}-{index}" if index else name)
    for name in (*TELLING, *sorted(DRAFTERS.keys() - set(TELLING)))
    for index in range(len(example_configs().get(name, [])))
    if name != "gemma4_mtp"  # whose target cannot be divided
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def kept_ranks(request):
    """Two ranks, for engine after engine, and where they say why they end."""
    device = request.param
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = EngineConfig(model=tiny_model(), tensor_parallel_size=2, device=device)
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    with capturing.global_and_fixture_disabled(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONFAULTHANDLER", "1")
        found, stderr = gather(config, device, keep=True), os.dup(2)
    yield found, stderr
    assert found.followers is not None
    found.followers.close()
    os.close(stderr)


@pytest.fixture
def ranks(kept_ranks, request):
    found, stderr = kept_ranks
    with watchdog(found.followers._processes, stderr, request.node.name):
        yield found


def pair(ranks: Ranks, **settings) -> tuple[LLM, LLM]:
    """The same engine on one rank and on two."""
    device = ranks.device.type
    sizes = (2, 4) if device == "cpu" else (4,)  # on a GPU each is captured at the start, for every kind of sampling
    settings = {"device": device, "dtype": "float32", "cudagraph_capture_sizes": sizes, **settings}
    # on a GPU nothing of the one is captured, which takes longest and changes no bit
    one = {**settings, "enforce_eager": True, "device_loop": "off"} if device == "cuda" else settings
    alone = engine(**one)
    moves()
    divided = make_engine(ranks=ranks, tensor_parallel_size=2, **settings)
    moves()
    return alone, divided


def speculation_counts(llm: LLM) -> dict:
    return {name: value for name, value in llm.get_metrics().items() if name.startswith("spec_decode")}


@pytest.mark.parametrize("draft_size", [1, None])
def test_sampling_grammars_and_processors_behind_drafters_that_are_whole_or_divided(draft_size, ranks):
    """What only rank 0 knows reaches the others: seeds, masks, biases."""
    spec = {**example_configs()["eagle3"][0], "draft_tensor_parallel_size": draft_size}
    if draft_size is None:
        spec["draft_sample_method"] = "probabilistic"
    alone, divided = pair(ranks, speculative_config=spec, max_num_seqs=4, model=tiny_model("spoken", words="w"))
    asked = prompts(4)
    params = [
        SamplingParams(temperature=0.9, top_k=20, seed=7, max_tokens=16),
        SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={3: 2.0}, max_tokens=16, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=16, allowed_token_ids=list(range(40))),
        SamplingParams(temperature=0, max_tokens=9),
    ]
    try:
        assert answers(divided.generate(asked, params)) == answers(alone.generate(asked, params))
        assert speculation_counts(divided) == speculation_counts(alone)
        num_rows = [len(one.engine.drafter.head.lm_head) for one in (alone, divided)]
        assert num_rows[0] == num_rows[1] * (draft_size or 2)
    finally:
        divided.close()


def test_greedy_rows_exchange_their_likeliest_tokens_and_no_logits(ranks):
    """Of target and drafter; a sampled row needs its logits whole."""
    spec = {**drafting_spec(3), "draft_sample_method": "probabilistic"}
    settings = {"device": ranks.device.type, "dtype": "float32", "enforce_eager": True, "speculative_config": spec}
    divided = make_engine(ranks=ranks, tensor_parallel_size=2, **settings)
    longest = []
    try:
        for params in (greedy(8), SamplingParams(temperature=1.0, seed=1, max_tokens=8)):
            with ranks.group.counting() as exchanged:
                divided.generate([1, 2, 3], params)
            longest.append(max(num_bytes for kind, num_bytes in exchanged if kind == "gather"))
    finally:
        divided.close()
    one_token = 8  # value and id in one integer
    assert longest[0] == 4 * one_token, "one for each verified token"
    assert longest[1] == 4 * VOCAB // 2 * 4


def test_mixtures_of_experts(ranks):
    alone, divided = pair(ranks, model=tiny_experts(), speculative_config=drafting_spec(2))
    try:
        assert answers(divided.generate(prompts(3), greedy(16))) == answers(alone.generate(prompts(3), greedy(16)))
        assert speculation_counts(divided) == speculation_counts(alone)
    finally:
        divided.close()


def test_a_preempted_request_and_a_shared_prefix(ranks):
    """Pages that move, that are shared and that are copied, are the same on every rank."""
    alone, divided = pair(ranks, max_model_len=64, kv_cache_memory_bytes=9 * 2 * 2 * 16 * 2 * 16 * 4 * 2)
    asked = [[*range(1, 30), end] for end in (40, 41, 42, 43)]
    try:
        for _ in range(2):
            assert answers(divided.generate(asked, greedy(24))) == answers(alone.generate(asked, greedy(24)))
        assert divided.get_metrics()["num_preemptions"] == alone.get_metrics()["num_preemptions"]
    finally:
        divided.close()


@pytest.mark.parametrize(("name", "index"), CASES)
def test_text_and_drafts_are_those_of_one_rank(name, index, ranks, tmp_path):
    spec = example_configs()[name][index]
    if name == "extract_hidden_states":
        spec = {**spec, "output_dir": str(tmp_path)}
    loop = {} if works_on_host(name, index) else {"device_loop": 8}
    alone, divided = pair(ranks, speculative_config=spec, **loop)
    asked, params = prompts(3), greedy(12)
    try:
        assert answers(divided.generate(asked, params)) == answers(alone.generate(asked, params))
        if not DRAFTERS[name].forced_acceptance:
            assert speculation_counts(divided) == speculation_counts(alone)
        if divided.engine.core.worker.loop:
            assert any(row.iterations for row in divided.get_graph_report().loops), "nothing looped"
    finally:
        divided.close()


# ---- weights --------------------------------------------------------------------------------


class Rank:
    """Stands for one of several ranks where nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_shards_are_the_parts_of_the_whole(load_format):
    """With fewer key/value heads than ranks, and a vocabulary that they do not divide."""
    whole, parts = load_parts(tiny_model("odd", vocab=157), 4, load_format=load_format)
    assert torch.equal(torch.cat([part.lm_head for part in parts])[:157], whole.lm_head)
    assert not parts[-1].lm_head[-3:].any()
    check_layers(whole, parts)


@pytest.mark.parametrize("name", [name for name in FORMATS if "fp8" in name])
def test_shards_of_8_bits_are_the_parts_of_the_whole(name, tmp_path):
    """Also where parts begin inside of a block."""
    quantised, _ = quantised_copy(tiny_model(), tmp_path, name)
    check_layers(*load_parts(str(quantised), 4))


each_family = pytest.mark.parametrize(
    ("family", "fused"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False)]
)


@each_family
def test_ranks_have_columns_of_every_expert(family, fused):
    whole, parts = load_parts(tiny_experts(family, fused=fused), 2)
    for layer, first in enumerate(whole.decoder_layers):
        mine = [part.decoder_layers[layer].mlp for part in parts]
        gates, ups = zip(*(one.gate_up_weight.chunk(2, 1) for one in mine), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], 1), first.mlp.gate_up_weight)
        assert torch.equal(torch.cat([one.down_weight for one in mine], 2), first.mlp.down_weight)
        assert all(torch.equal(one.router_weight, first.mlp.router_weight) for one in mine)
    config = replace(whole.config, experts=replace(whole.config.experts, inner_size=30))
    assert why_not_divided(config, 4) == "it does not divide the 30 columns of an expert"


@each_family
def test_engines_that_share_experts_have_each_once_and_all_else_whole(family, fused):
    whole, parts = load_parts(tiny_experts(family, fused=fused), 2, among="engines")
    named = [dict(model.named_parameters()) for model in (whole, *parts)]
    assert [name for name in named[0] if ".mlp.gate_up" in name or ".mlp.down" in name]
    for name, weight in named[0].items():
        mine = [one[name] for one in named[1:]]
        if ".mlp.gate_up" in name or ".mlp.down" in name:
            assert torch.equal(torch.cat(mine), weight)
            assert mine[0].shape == mine[1].shape
        else:
            assert all(torch.equal(one, weight) for one in mine)
    costs = [model.cost() for model in (whole, *parts)]
    assert len({(cost.weight_bytes, cost.expert_bytes) for cost in costs}) == 1
    assert [cost.num_experts for cost in costs] == [6, 3, 3]
    assert [cost.experts_per_token for cost in costs] == pytest.approx([2, 5 / 3, 5 / 3])


UNUSED = SimpleNamespace(shape=SimpleNamespace(kv_dtype=torch.float32))
"""In the place of an attention backend."""


def load_parts(folder, size, *, among="group", **options):
    """The whole model, and what each rank has of it."""
    source = resolve_model(folder, load_format="auto")
    config, shared = load_config(source), {"device": torch.device("cpu"), "dtype": torch.float32, **options}
    whole, *parts = (
        load_model(source, config, UNUSED, **{among: group}, **shared)
        for group in (ALONE, *(Rank(rank, size) for rank in range(size)))
    )
    return whole, parts


def check_layers(whole, parts):
    for layer, (first, *_) in enumerate(zip(whole.decoder_layers, strict=True)):
        mine = [part.decoder_layers[layer] for part in parts]
        q, k, v = first.attention.qkv_weight.split(first.attention.qkv_sizes)
        qs, ks, vs = zip(*(one.attention.qkv_weight.split(one.attention.qkv_sizes) for one in mine), strict=True)
        assert torch.equal(torch.cat(qs), q)
        for got, expected in ((ks, k), (vs, v)):
            assert torch.equal(torch.cat([got[0], got[2]]), expected)
            assert torch.equal(got[0], got[1])
        assert torch.equal(torch.cat([one.attention.o_weight for one in mine], 1), first.attention.o_weight)
        gates, ups = zip(*(one.mlp.gate_up_weight.chunk(2) for one in mine), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), first.mlp.gate_up_weight)
        assert torch.equal(torch.cat([one.mlp.down_weight for one in mine], 1), first.mlp.down_weight)


# ---- what cannot be -------------------------------------------------------------------------

DRAFT_MODEL = {"method": "draft_model", "model": tiny_model("near-draft-3", seed=1), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; it must be 1; raise tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size is 2; it must be 1 where tensor"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, but it does not divide the 4 attention heads"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora is set"),
        ({"tensor_parallel_size": 2, "quantization": "int4"}, "weights of 4 bits are not divided"),
        ({"tensor_parallel_size": 2, "model": gemma4_target()}, "layers of Gemma4ForCausalLM cannot be divided"),
        (
            {"tensor_parallel_size": 2, "speculative_config": {**DRAFT_MODEL, "draft_tensor_parallel_size": 4}},
            "draft_tensor_parallel_size is 4; it must be 1, or tensor_parallel_size, 2",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_starts(settings, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=message):
        make_engine(**settings)


def test_a_gpu_for_each_rank_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but this machine has 1 GPU"):
        gather(EngineConfig(model=tiny_model(), tensor_parallel_size=2), "cuda")


def test_torchrun_must_have_started_as_many_processes(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(model=tiny_model(), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not"):
        gather(config, "cpu")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'first'; they must be integers >= 0, as torchrun sets them"):
        gather(config, "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4, as torchrun has it, but the settings ask for 2 ranks"):
        gather(config, "cpu")


# ---- life and death -------------------------------------------------------------------------

PATIENCE_S = 120
NOTICED_S = 10
"""By then the death of a rank must have ended the others."""

SCRIPT = """
import sys, time
from draftloop import LLM, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, device="cpu", max_model_len=128, max_num_seqs=2)
params = SamplingParams(temperature=0, max_tokens=8)
print(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids, flush=True)
if "wait" in sys.argv:
    time.sleep(600)
llm.close()
"""


def test_by_torchrun_on_two_nodes_rank_0_runs_the_script():
    """Both nodes are this machine; they share nothing but an address."""
    torchrun = Path(sys.executable).with_name("torchrun")
    script = Path(tiny_model()).parent / "two_ranks.py"
    script.write_text(SCRIPT.format(model=tiny_model()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}"]
    command = [torchrun, *options, "--local-addr=127.0.0.1", script]
    said = on_nodes([command] * 2, PATIENCE_S)
    expected = answers(engine().generate([[1, 2, 3]], greedy(8)))
    assert "".join(said).splitlines() == [str(expected[0])], "once, by rank 0"


def test_a_killed_rank_is_noticed_with_the_cause():
    llm = make_engine(tensor_parallel_size=2)
    followers = llm.engine.core.worker.followers
    (process,) = followers._processes
    llm.generate([[1, 2, 3]], greedy(4))
    os.kill(process.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has ended: killed by signal 9"):
        _ = [llm.generate([[1, 2, 3]], greedy(4)) for _ in range(10_000)]
    assert time.monotonic() < begin + NOTICED_S
    llm.close()


def test_a_process_that_notices_nothing_ends_too(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(SCRIPT.format(model=tiny_model()))
    with subprocess.Popen(
        [sys.executable, script, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline()
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, error = job.communicate(timeout=NOTICED_S)
    assert job.returncode == 1
    assert "rank 1 has ended: killed by signal 9" in error


def test_a_rank_whose_leader_is_gone_ends(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(SCRIPT.format(model=tiny_model()))
    with subprocess.Popen([sys.executable, script, "wait"], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline()
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        job.kill()
        begin = time.monotonic()
        while Path(f"/proc/{children[0]}").exists() and time.monotonic() < begin + PATIENCE_S:
            time.sleep(0.05)
        assert not Path(f"/proc/{children[0]}").exists()


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        make_engine(
            tensor_parallel_size=2,
            speculative_config={"method": "scripted", "script": lambda *_: [], "num_speculative_tokens": 1},
        )
