"""What users may ask of the engine. Names and meanings are vLLM's where vLLM has them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from draftloop.config.fields import build, check, check_fields
from draftloop.config.speculative import SpeculativeConfig
from draftloop.errors import ConfigError

CudagraphMode = Literal["auto", "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]

PAGE_SIZES = (16, 32, 64)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
LOOPS = "'auto', 'off', or how many steps the device may repeat, an integer >= 1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is fixed when an engine starts. Each docstring is also the option's help."""

    model: str = "smollm2-135m"
    """Hub id, local folder or alias."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's: hub id or folder."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    download_dir: str | None = None
    """Folder for downloaded models instead of the default caches."""
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = "auto"
    """How weights are loaded; pt: from pickles too, as tensors and nothing else; dummy: random ones, for benchmarks."""
    quantization: Literal["fp8", "int4", "gptq", "awq", "compressed-tensors"] | None = None
    """Quantise plain weights while they load: fp8, or int4 (lossy: groups of 128, rounded to nearest). Checkpoints that
    are quantised need nothing; the other names only check that they are."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto: float32 on a CPU, the model's own on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU if there is one."""
    tensor_parallel_size: int = 1
    """GPUs that share the model, each with a part of every layer; one process runs on each."""
    data_parallel_size: int = 1
    """Engines that a server starts and shares the requests among, each with a whole model on a GPU of its own."""
    enable_expert_parallel: bool = False
    """Experts are divided among the engines, which then take every step together."""
    pipeline_parallel_size: int = 1
    """Groups of GPUs that share the layers; 1, since this engine divides layers alone."""
    seed: int = 0
    """Seed of the requests that bring none."""
    deterministic: bool = False
    """A request's tokens and logprobs do not depend on what runs beside it, in 16-bit arithmetic neither; slower."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together; left out, the model's own length."""
    max_num_seqs: int = 16
    """Rows: requests that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Prompt tokens that one step may process; longer prompts run in chunks."""
    max_prefill_rows: int = 16
    """Prompts that one step may process."""
    min_prefill_rows: int = 1
    """While rows decode, prompts wait until as many rows are free; for throughput, where nobody waits for an answer."""
    block_size: int | None = None
    """Tokens per cache page: 16, 32 or 64."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory to use, in (0, 1]."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Type of the target's keys and values; auto: the model's own. A drafter's are always of its own type."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the cache pages, instead of what memory allows."""
    enable_prefix_caching: bool | None = None
    """Compute a beginning that prompts share once; left out, on unless the drafter cannot."""
    enforce_eager: bool = False
    """Capture nothing; same as --cudagraph-mode NONE."""
    cudagraph_mode: CudagraphMode = "auto"
    """Which batches run as captured graphs (as recorded tapes on a CPU)."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Row counts to capture, instead of the default ladder. The unit is rows, not tokens."""
    require_graphs: bool = False
    """Make it an error where a step that allows graphs is not covered or runs eager."""
    iteration_graph: bool | None = None
    """Run a whole decoding step as one graph; left out, on for GPUs."""
    device_loop: Literal["auto", "off"] | int = "auto"
    """Decoding steps that the device may repeat with no host in between; auto: 64 on GPUs, none on a CPU."""
    attention_backend: str = "auto"
    """Attention implementation; auto takes the best one for the device."""
    max_logprobs: int = 20
    """Most likeliest tokens that a request may have reported at each place."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Report what the model says, or what is left of it after the request's sampling parameters."""
    logits_processors: tuple[str, ...] = ()
    """Custom rules for logits, each "package.module:Class", a LogitsProcessor."""
    enable_lora: bool = False
    """Let requests be answered with adapters (LoRA) of the target."""
    lora_modules: tuple[str, ...] = ()
    """Adapters to load at the start, each NAME=FOLDER, or {"name": .., "path": ..} as JSON."""
    max_loras: int = 1
    """Adapters that there is memory for."""
    max_lora_rank: int = 16
    """Largest rank of an adapter: a power of 2 from 8 to 512."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs; left out, on for GPUs unless the drafter works on the host."""
    disable_log_stats: bool = False
    """Log no statistics while serving."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while weights load."""
    speculative_config: SpeculativeConfig | None = None
    """Speculation as JSON, such as '{"method": "ngram", "num_speculative_tokens": 5}'."""

    @classmethod
    def from_mapping(cls, **values: Any) -> EngineConfig:
        """Make it from keywords, `speculative_config` as a dict. Raises ConfigError naming the nearest keyword."""
        return build(cls, "engine setting", values)

    def __post_init__(self) -> None:
        self._accept_kin()
        check_fields(self)
        self._need(bool(self.model), "model", "a hub id, a folder or an alias")
        self._need(0 <= self.seed < 2**63, "seed", "in [0, 2**63)")
        for name in ("max_num_seqs", "max_prefill_rows"):
            self._need(getattr(self, name) >= 1, name, "an integer >= 1")
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            self._need(value is None or value >= 1, name, "an integer >= 1")
        most = min(self.max_prefill_rows, self.max_num_seqs)
        limit = f"in [1, {most}], what max_prefill_rows and max_num_seqs allow"
        self._need(1 <= self.min_prefill_rows <= most, "min_prefill_rows", limit)
        self._need(self.tensor_parallel_size >= 1, "tensor_parallel_size", "an integer >= 1")
        self._need(self.data_parallel_size >= 1, "data_parallel_size", "an integer >= 1")
        limit = "1 where tensor_parallel_size is above 1; serve once on each group of GPUs"
        self._need(self.data_parallel_size == 1 or self.tensor_parallel_size == 1, "data_parallel_size", limit)
        limit = "1; raise tensor_parallel_size to have more GPUs share a model"
        self._need(self.pipeline_parallel_size == 1, "pipeline_parallel_size", limit)
        self._need(self.max_logprobs >= 0, "max_logprobs", "an integer >= 0")
        self._need(self.max_loras >= 1, "max_loras", "an integer >= 1")
        self._need(self.max_lora_rank in LORA_RANKS, "max_lora_rank", "a power of 2 from 8 to 512")
        self._need(self.enable_lora or not self.lora_modules, "lora_modules", "left out without enable_lora")
        limit = f"a list of at most max_loras, {self.max_loras}; raise that"
        self._need(len(self.adapters) <= self.max_loras, "lora_modules", limit)
        self._need(self.device_loop in ("auto", "off") or int(self.device_loop) >= 1, "device_loop", LOOPS)
        self._need(self.block_size in (None, *PAGE_SIZES), "block_size", "16, 32 or 64")
        self._need(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "in (0, 1]")
        sizes = self.cudagraph_capture_sizes
        if sizes is not None:
            name = "cudagraph_capture_sizes"
            self._need(len(sizes) > 0, name, "a list of at least one row count (enforce_eager captures nothing)")
            self._need(min(sizes) >= 1, name, "a list of row counts >= 1")
            limit = f"a list of row counts up to max_num_seqs, {self.max_num_seqs} (the unit is rows, not tokens)"
            self._need(max(sizes) <= self.max_num_seqs, name, limit)

    @property
    def steps_together(self) -> bool:
        """Several engines take every step together, since their layers exchange tokens."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The speculation in force: None where there is none or K = 0 was asked for."""
        spec = self.speculative_config
        return spec if spec is not None and spec.enabled else None

    @cached_property
    def adapters(self) -> dict[str, str]:
        """`lora_modules`: folders by name. Raises ConfigError where one does not say both, or a name comes twice."""
        found: dict[str, str] = {}
        for text in self.lora_modules:
            name, _, path = text.partition("=")
            if text.lstrip().startswith("{"):
                try:
                    given = json.loads(text)
                    name, path = given["name"], given["path"]
                except (ValueError, KeyError):
                    name = path = ""
            if not (isinstance(name, str) and isinstance(path, str)):
                name = path = ""
            if not name or not path or name in found:
                limit = "NAME=FOLDER, or JSON with name and path, and each name once"
                raise ConfigError(f"lora_modules has {text!r}; it must be {limit}")
            found[name] = path
        return found

    def _accept_kin(self) -> None:
        """Take what Python callers naturally pass: lists, dicts, paths, torch dtypes."""
        put = object.__setattr__
        put(self, "speculative_config", SpeculativeConfig.from_mapping(self.speculative_config))
        for name in ("model", "tokenizer", "download_dir"):
            if isinstance(value := getattr(self, name), os.PathLike):
                put(self, name, os.fspath(value))
        if type(self.dtype).__module__ == "torch":
            put(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("cudagraph_capture_sizes", "logits_processors", "lora_modules"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                put(self, name, tuple(value))

    def _need(self, ok: bool, name: str, limit: str) -> None:
        check(ok, self, name, limit)
