"""From a model's files to a decoder with weights, its tokenizer and its end-of-sequence ids.

Weights may be quantised (see models/quantisation.py). Those stored in 8 bits with a scale per row, as shipped drafters
have them (see models/tensors.py), are floats of the model's dtype once loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.errors import ConfigError
from draftloop.models.config import GEMMA4_ARCHITECTURES, SUPPORTED, ModelConfig
from draftloop.models.config_file import check_config, read_config
from draftloop.models.fallback_config import FallbackConfig, read_fallback_config
from draftloop.models.gemma4_config import Gemma4Config
from draftloop.models.presets import PRESETS
from draftloop.models.quantisation import chosen
from draftloop.models.resolve import (
    ALIASES,
    LOAD_FORMATS,
    LoadFormat,
    ModelSource,
    check_folder,
    read_json,
    resolve_model,
    weight_files,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from draftloop.attention.base import AttentionBackend
    from draftloop.distributed.group import Group
    from draftloop.models.decoder import Decoder
    from draftloop.models.fill import Loaded

__all__ = [
    "ALIASES",
    "LOAD_FORMATS",
    "LoadFormat",
    "ModelSource",
    "eos_token_ids",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve_model",
    "sampling_defaults",
]

DUMMY_STD = 0.02
"""Standard deviation of random weights; that of an untrained Llama."""
GENERATION_CONFIG = "generation_config.json"


def load_config(source: ModelSource, *, quantization: str | None = None) -> ModelConfig:
    """The model's shape; `quantization` is what the user asked for, see `quantisation.chosen`.

    Raises ConfigError for a missing or unsupported config.json.
    """
    config = _own_config(source)
    return replace(config, quantisation=chosen(config.quantisation, quantization))


def _own_config(source: ModelSource) -> ModelConfig:
    if source.preset is not None:
        return PRESETS[source.preset]
    folder = _folder(source)
    check_folder(folder, weights=False)
    hf = read_config(folder, "architectures")
    names = hf.get("architectures") or []
    if not any(name in SUPPORTED for name in names):
        return read_fallback_config(folder, hf)
    check_config(hf, folder / "config.json")
    if any(name in GEMMA4_ARCHITECTURES for name in names):
        return Gemma4Config.from_hf(hf)
    return ModelConfig.from_hf(hf)


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """Ids that end a sequence: those of generation_config.json, else of config.json."""
    if source.folder is not None and (source.folder / GENERATION_CONFIG).is_file():
        ids = read_config(source.folder, "eos_token_id", name=GENERATION_CONFIG).get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return load_config(source).eos_token_ids


def sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json says of sampling, by the names of `SamplingParams`."""
    path = source.folder / GENERATION_CONFIG if source.folder is not None else None
    if path is None or not path.is_file():
        return {}
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    values = read_json(path)
    given = {mine: values.get(theirs) for theirs, mine in {**names, "max_new_tokens": "max_tokens"}.items()}
    return {name: value for name, value in given.items() if value is not None}


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer with its chat template; None for a shape preset, which has none.

    tokenizer.json is read as it stands; only folders without one go through AutoTokenizer, which
    takes seconds to import. Raises ConfigError where the folder holds no tokenizer.
    """
    if source.folder is None:
        return None
    try:
        if (source.folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(source.folder))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(source.folder))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"cannot read the tokenizer in {source.folder}: {error}") from error


def load_model(
    source: ModelSource,
    config: ModelConfig,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    group: Group | None = None,
    engines: Group | None = None,
    may_narrow: bool = True,
    show_progress: bool | None = None,
    report: Callable[[Loaded], None] | None = None,
) -> Decoder:
    """A decoder with weights: the folder's, or with load_format "dummy" random ones made by `seed`.

    Each rank of a `group` reads its own part (models/shards.py), for which `backend` attends; `engines` share experts.

    Linear layers are quantised as `config` says, on a GPU; a CPU gets the plain weights that they stand for. One that
    computes in float32 keeps bf16 matrices as they are (models/weights.py, `keep_narrow`), which kernels/linear.py and
    kernels/widened.py take; without `may_narrow`, and in parts of a model, every weight is of `dtype`.
    `max_positions` defaults to the model's own length. `show_progress` None shows a bar on terminals only; `report`
    is told how fast files were read. Raises ConfigError for missing, unexpected or misshapen tensors, before any is
    read.
    """
    from draftloop.models.fill import Loaded, bytes_of, fill_from_files

    files = [] if load_format == "dummy" else weight_files(_folder(source), pickled=load_format == "pt")
    if isinstance(config, FallbackConfig):
        from draftloop.models.fallback import load_fallback

        begin = time.perf_counter()
        decoder = load_fallback(
            _folder(source),
            config,
            backend,
            device=device,
            dtype=dtype,
            files=files,
            seed=seed,
            show_progress=show_progress,
        )
        if report is not None and files:
            report(Loaded(num_bytes=bytes_of(files), seconds=time.perf_counter() - begin))
        return decoder
    import torch

    from draftloop.distributed.group import ALONE
    from draftloop.models.weights import dequantise, warn_of_plain_layers

    max_positions = max_positions or config.max_position_embeddings
    ranks = {"group": group or ALONE, "engines": engines or ALONE}
    model = _decoder(config, backend, device=device, dtype=dtype, max_positions=max_positions, **ranks)
    if config.quantisation is not None:
        warn_of_plain_layers(model, config.architecture)
    if load_format == "dummy":
        fill_dummy(model, seed=seed)
    else:
        loaded = fill_from_files(
            model,
            files,
            quantisation=config.quantisation,
            may_narrow=may_narrow and model.group.size == 1,
            show_progress=show_progress,
        )
        model.settle()
        if report is not None:
            report(loaded)
    if not keeps_quantised(device):
        dequantise(model, dtype)
    elif config.quantisation is not None or group is not None:
        torch.cuda.empty_cache()  # what packing, or whole random weights, took is the cache's now
    return model


def bytes_per_weight(config: ModelConfig, load_format: LoadFormat, *, device: torch.device, dtype: torch.dtype) -> int:
    """What most weights of a model that is not divided will take, by the type that config.json names."""
    from draftloop.kernels.native.functions import available

    narrow = (config.dtype, load_format != "dummy", device.type, dtype.itemsize) == ("bfloat16", True, "cpu", 4)
    return 2 if narrow and available() else dtype.itemsize


def keeps_quantised(device: torch.device) -> bool:
    """Whether kernels read quantised weights there."""
    return device.type == "cuda"


def _decoder(
    config: ModelConfig,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    group: Group,
    engines: Group,
) -> Decoder:
    """The kind of decoder that a config describes, without weights."""
    if isinstance(config, Gemma4Config):
        from draftloop.models.gemma4 import Gemma4Decoder

        return Gemma4Decoder(config, backend, device=device, dtype=dtype, max_positions=max_positions)
    from draftloop.models.dense import DenseDecoder

    return DenseDecoder(
        config, backend, device=device, dtype=dtype, max_positions=max_positions, group=group, engines=engines
    )


def fill_dummy(model: Decoder, *, seed: int) -> None:
    """Random weights, made on the model's device: same seed, same device type, same weights."""
    import torch

    from draftloop.kernels.quantised import QuantisedWeight
    from draftloop.models.shards import fill_random, named_slices
    from draftloop.models.weights import named_weights

    device, dtype = model.embed_tokens.device, model.embed_tokens.dtype
    generator = torch.Generator(device=device).manual_seed(seed)
    slices = dict(named_slices(model))
    for name, weight in named_weights(model):
        if isinstance(weight, QuantisedWeight):
            mine, shape = slices.get(name), list(weight.shape)
            if mine is not None:
                shape[mine.dim] = mine.size
            plain = torch.empty(shape, device=device, dtype=dtype).normal_(0, DUMMY_STD, generator=generator)
            weight.fill(0, weight.quantise(plain if mine is None else mine.take(plain)))
        elif name.endswith(("norm", "scalar")):
            weight.data.fill_(1)
        else:
            # rows past the vocabulary are padding
            memory = weight.data[: model.config.vocab_size] if weight is model.embed_tokens else weight.data
            fill_random(memory, slices.get(name), DUMMY_STD, generator)


def _folder(source: ModelSource) -> Path:
    assert source.folder is not None, "`resolve_model` takes a shape without files for random weights alone"
    return source.folder
