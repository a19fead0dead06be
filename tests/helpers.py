"""Shared by tests: small graph tables, a tiny model with varied output, engines and what they must answer.

The model is small enough to run thousands of steps on a CPU. Its weights are large, so that its greedy
text is varied and the two likeliest tokens are far apart: a wrong key, value or position shows in the
next few tokens.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftloop.config import EngineConfig
from draftloop.distributed.launcher import Ranks
from draftloop.engine.core import EngineCore
from draftloop.engine.llm import LLM
from draftloop.graphs.phase import ModeSetting, Phase
from draftloop.graphs.program import Recorder
from draftloop.graphs.sizes import Ladders
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from draftloop.kvcache.pages import PageAllocator
from draftloop.kvcache.rows import NO_DRAFT
from draftloop.request import RequestOutput, SamplingParams
from draftloop.scheduler.batch import Sequence as Request
from draftloop.scheduler.scheduler import Scheduler

MODES = tuple(ModeSetting)
NO_EOS = 10_000
"""An id that no tiny model knows, so that nothing ends before its limit."""

# ---- graph tables ---------------------------------------------------------------------------


def make_recorder(device: str) -> Recorder:
    if device == "cuda":
        from draftloop.graphs.cuda import CudaRecorder

        return CudaRecorder(torch.device("cuda"))
    return TapeRecorder()


def make_table(
    phases: Iterable[Phase],
    *,
    rows: Sequence[int] = (1, 2, 4),
    tokens: Sequence[int] = (8, 16),
    prefill_rows: int = 2,
    setting: str = "FULL",
    largest_rows: int | None = None,
    largest_tokens: int | None = None,
    device: str = "cpu",
    recorder: Recorder | None = None,
    capture: bool = True,
    **options: Any,
) -> GraphTable:
    """A table over a few phases, captured unless told otherwise; poison is off unless asked for."""
    table = GraphTable(
        phases,
        Ladders(rows=tuple(rows), tokens=tuple(tokens), prefill_rows=prefill_rows),
        ModeSetting(setting),
        recorder or make_recorder(device),
        torch.device(device),
        largest_rows=largest_rows or max(rows),
        largest_tokens=largest_tokens or max(tokens),
        **{"poison": False, **options},
    )
    if capture:
        table.capture()
    return table


# ---- scheduling -----------------------------------------------------------------------------


_NUMBERS = itertools.count()


def make_scheduler(
    *, num_pages: int = 65, page_size: int = 16, windows: Mapping[int, int] | None = None, **settings: Any
) -> Scheduler:
    """`windows`: pages of groups of layers that have these windows."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_prefill_rows": 4, "max_model_len": 128}
    groups = [PageAllocator(num_pages, page_size)]
    groups += [PageAllocator(count, page_size, window) for window, count in (windows or {}).items()]
    return Scheduler(groups, **{**defaults, "num_drafts": 0, **settings})


def make_request(name: str, num_prompt: int, *, max_tokens: int = 8, **options: Any) -> Request:
    return Request(
        request_id=name,
        number=next(_NUMBERS),
        prompt_ids=list(range(1, num_prompt + 1)),
        params=SamplingParams(temperature=0, max_tokens=max_tokens),
        eos_ids=frozenset(),
        **options,
    )


def answering(core: EngineCore) -> list[Request]:
    """Rows that have said something; what is drafted for them follows it."""
    return [sequence for sequence in core.scheduler.running if sequence.output_ids]


def check_books(scheduler: Scheduler, *, num_rows: int) -> None:
    """Every row and page is held by who says so, or free, and pages are found under their own key only."""
    for group, pages in enumerate(scheduler.groups):
        counts = Counter[int]()
        for sequence in scheduler.running:
            held = sequence.held[group]
            counts.update(held.ids)
            counts.update([] if held.copied is None else [held.copied])
            assert len(set(held.ids)) == len(held.ids)
            assert pages.window is not None or held.first == 0
        assert {page: pages.num_holders(page) for page in range(pages.num_pages)} == {
            page: counts[page] for page in range(pages.num_pages)
        }
        assert sorted([*counts, *pages.free_pages]) == list(range(1, pages.num_pages))
        assert {pages._page_of[key]: key for key in pages._page_of} == pages._key_of
    for sequence in scheduler.waiting:
        assert (sequence.row, sequence.held) == (-1, [])
    assert sorted([s.row for s in scheduler.running] + scheduler._free_rows) == list(range(num_rows))


# ---- a tiny model ---------------------------------------------------------------------------

HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2
VOCAB = 160
MAX_LEN = 192


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="draftloop-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def tiny_model(
    name: str = "target",
    *,
    vocab: int = VOCAB,
    noise: float = 0.0,
    seed: int = 0,
    words: str = "",
    eos: int = NO_EOS,
    max_len: int = MAX_LEN,
    hidden: int = HIDDEN,
) -> str:
    """Folder of a two-layer Llama in fp32.

    `noise` adds as much random weight, relative to what is there: a drafter that is right most of the
    time. `words` writes a tokenizer.json whose tokens are that prefix and the id.
    """
    folder = _folder() / name
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab, noise, seed, hidden), folder / "model.safetensors", metadata={"format": "pt"})
    if words:
        vocabulary = {f"{words}{i}": i for i in range(vocab)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": f"{words}0"}
        pre = {"type": "WhitespaceSplit"}
        (folder / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "model": model, "pre_tokenizer": pre, "added_tokens": []})
        )
    return str(folder)


def _weights(vocab: int, noise: float, seed: int, hidden: int) -> dict[str, Tensor]:
    # drawn for the largest vocabulary and cut, so that models of unlike vocabularies agree on common ids
    width, inner = hidden // HEADS * KV_HEADS, 2 * hidden
    shapes = {"model.embed_tokens.weight": (512, hidden), "lm_head.weight": (512, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (width, hidden),
            f"{prefix}self_attn.v_proj.weight": (width, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    generator, other = (torch.Generator().manual_seed(s) for s in (seed, seed + 1000))
    weights = {}
    for key, shape in shapes.items():
        std = 1.0 if "embed" in key else (0.6 if "lm_head" in key else 0.2) * (HIDDEN / hidden) ** 0.5
        weight = torch.randn(shape, generator=generator) * std
        weight += torch.randn(shape, generator=other) * std * noise
        weights[key] = weight[:vocab].clone() if "embed" in key or "lm_head" in key else weight
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


# ---- engines --------------------------------------------------------------------------------

_ENGINES: dict[str, LLM] = {}


def make_engine(model: str | None = None, *, ranks: Ranks | None = None, **settings: Any) -> LLM:
    """A new engine of the tiny model, or of the one that the drafter's examples need."""
    torch.set_num_threads(1)
    defaults = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_prefill_rows": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 24,
        "device": "cpu",
    }
    model = model or example_target(settings.get("speculative_config")) or tiny_model()
    return LLM.from_config(EngineConfig.from_mapping(model=model, **{**defaults, **settings}), ranks=ranks)


def engine(model: str | None = None, *, poison: bool | None = None, **settings: Any) -> LLM:
    """The same, made once for each set of settings. It must be left idle. `poison` None: as the environment says."""
    key = repr((model, sorted(settings.items(), key=lambda item: item[0])))
    if key not in _ENGINES:
        if len(_ENGINES) >= 24:
            _ENGINES.pop(next(iter(_ENGINES))).close()
        _ENGINES[key] = make_engine(model, **settings)
    llm = _ENGINES[key] = _ENGINES.pop(key)  # the one asked for last goes last
    core = llm.engine.core
    assert core.idle, "an earlier test left this engine busy"
    core.reset_prefix_cache()
    if poison is not None:
        llm.engine.table.poison = poison
    llm.engine.table.reset_counts()
    core.stats = type(core.stats)(num_drafts=core.stats.num_drafts, drafters=core.stats.drafters)
    return llm


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompts(count: int, *, longest: int = 20, vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
    """Prompts of unlike lengths, each with a stretch that comes twice (so that lookup finds something)."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        length = 1 + (index * 7 + 4) % longest
        half = [rng.randrange(vocab) for _ in range((length + 1) // 2)]
        made.append((half + half)[:length])
    return made


_ANSWERS: dict[tuple, list[int]] = {}


def oracle(
    prompt: Sequence[int], max_tokens: int, *, model: str | None = None, max_model_len: int = 128, device: str = "cpu"
) -> list[int]:
    """Greedy tokens of the plain engine in fp32: no graphs, no speculation, one request at a time."""
    key = (model, device, tuple(prompt))
    known, want = _ANSWERS.get(key, []), min(max_tokens, max_model_len - len(prompt))
    if len(known) < want:
        plain = engine(model, device=device, dtype="float32", cudagraph_mode="NONE", max_num_seqs=1, max_prefill_rows=1)
        _ANSWERS[key] = known = plain.generate(list(prompt), greedy(max(want, 40)))[0].outputs[0].token_ids
    return known[:want]


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_through(llm: LLM, after_step: Callable[[], None] | None = None) -> dict[str, list[int]]:
    """Step until idle; tokens of every request that ended, by id."""
    ended: dict[str, list[int]] = {}
    core = llm.engine.core
    for _ in range(10_000):
        if core.idle:
            return ended
        for sequence, _text in core.step():
            if sequence.finish_reason is not None:
                ended[sequence.request_id] = list(sequence.output_ids)
        if after_step:
            after_step()
    raise AssertionError("the engine never became idle")


def shrink(llm: LLM, num_pages: int, by_window: Mapping[int | None, int] | None = None) -> None:
    """Let an engine, which must be idle and is used for nothing else, have fewer pages than memory allows: so many of
    each group of layers, or as `by_window` says."""
    core, table, pool = llm.engine.core, llm.engine.table, llm.engine.pool
    assert core.idle
    assert num_pages <= pool.num_pages
    counts = {window: min(num_pages, pool.num_pages_of(window)) for window in pool.windows} | dict(by_window or {})
    groups = [PageAllocator(counts[window], pool.page_size, window) for window in pool.windows]
    core.scheduler.groups[:] = groups

    def poison() -> None:
        for pages in groups:
            pool.poison(pages.newly_free(), window=pages.window)

    table._poison_more = poison


def assert_all_free(llm: LLM) -> None:
    """At idle nothing is held: all rows and pages are free."""
    scheduler = llm.engine.core.scheduler
    assert llm.engine.core.idle
    assert scheduler.running == []
    assert sorted(scheduler._free_rows) == list(range(llm.engine.resolved.max_num_seqs))
    assert scheduler.num_pages_held == 0
    for pages in scheduler.groups:
        assert sorted(pages.free_pages) == list(range(1, pages.num_pages))


# ---- drafters -------------------------------------------------------------------------------


def near_draft() -> str:
    """Folder of a drafter that is right about half of the time."""
    return tiny_model("near", noise=0.06)


def drafting_spec(num_drafts: int = 3) -> dict[str, Any] | None:
    """A model that drafts that many, about half of them right; none for 0."""
    spec = {"method": "draft_model", "model": near_draft(), "num_speculative_tokens": num_drafts}
    return spec if num_drafts else None


def example_target(spec: Mapping[str, Any] | None) -> str | None:
    """The target of a drafter's examples, where it is not the tiny model."""
    from gemma4 import gemma4_target

    method = spec.get("method") if isinstance(spec, Mapping) else None
    return gemma4_target() if method == "gemma4_mtp" else spec["model"] if spec and method == "mtp" else None


@functools.cache
def ending_at(folder: str, eos: int) -> str:
    """Folder of the same model, whose sequences end with `eos`."""
    other = _folder() / f"{Path(folder).name}-ends-{eos}"
    other.mkdir()
    config = json.loads((Path(folder) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    (other / "model.safetensors").symlink_to(Path(folder) / "model.safetensors")
    return str(other)


def lookup_reference(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    """What prompt lookup must draft: the longest match; of equal ones that with most to copy, then the last."""
    end = len(tokens)
    best: tuple[int, int, int] | None = None
    for size in range(shortest, longest + 1):
        for start in range(size, end):  # the match is tokens[start - size : start]
            if tokens[start - size : start] == tokens[end - size :]:
                best = max(best or (0, 0, 0), (size, min(end - start, k), start))
    found = tokens[best[2] : best[2] + k] if best else []
    return found + [NO_DRAFT] * (k - len(found))
