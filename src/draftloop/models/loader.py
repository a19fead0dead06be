"""From a model's files to a decoder with weights, its tokenizer and its end-of-sequence ids.

Weights may be stored in 8 bits with a scale per row, as those of shipped drafters are (see models/tensors.py);
they are floats of the model's dtype once loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.errors import ConfigError
from draftloop.models.config import GEMMA4_ARCHITECTURES, PRESETS, ModelConfig
from draftloop.models.gemma4_config import Gemma4Config
from draftloop.models.progress import progress_bar
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
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from draftloop.attention.base import AttentionBackend
    from draftloop.models.decoder import Decoder
    from draftloop.models.tensors import Tensors

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

MAX_NAMED = 5
"""Tensors named in one message."""


def load_config(source: ModelSource) -> ModelConfig:
    """The model's shape. Raises ConfigError for a missing or unsupported config.json."""
    if source.preset is not None:
        return PRESETS[source.preset]
    folder = _folder(source)
    check_folder(folder, weights=False)
    hf = read_json(folder / "config.json")
    is_gemma4 = any(name in GEMMA4_ARCHITECTURES for name in hf.get("architectures") or [])
    return Gemma4Config.from_hf(hf) if is_gemma4 else ModelConfig.from_hf(hf)


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """Ids that end a sequence: those of generation_config.json, else of config.json."""
    if source.folder is not None and (path := source.folder / "generation_config.json").is_file():
        ids = read_json(path).get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return load_config(source).eos_token_ids


def sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json says of sampling, by the names of `SamplingParams`."""
    path = source.folder / "generation_config.json" if source.folder is not None else None
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
    show_progress: bool | None = None,
) -> Decoder:
    """A decoder with weights: the folder's, or with load_format "dummy" random ones made by `seed`.

    `max_positions` defaults to the model's own length. `show_progress` None shows a bar on
    terminals only. Raises ConfigError for missing, unexpected or misshapen tensors, before any is read.
    """
    files = [] if load_format == "dummy" else weight_files(_folder(source))
    max_positions = max_positions or config.max_position_embeddings
    model = _decoder(config, backend, device=device, dtype=dtype, max_positions=max_positions)
    if load_format == "dummy":
        fill_dummy(model, seed=seed)
    else:
        fill_from_files(model, files, show_progress=show_progress)
    return model


def _decoder(
    config: ModelConfig, backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype, max_positions: int
) -> Decoder:
    """The kind of decoder that a config describes, without weights."""
    if isinstance(config, Gemma4Config):
        from draftloop.models.gemma4 import Gemma4Decoder

        return Gemma4Decoder(config, backend, device=device, dtype=dtype, max_positions=max_positions)
    from draftloop.models.dense import DenseDecoder

    return DenseDecoder(config, backend, device=device, dtype=dtype, max_positions=max_positions)


def fill_dummy(model: Decoder, *, seed: int) -> None:
    """Random weights, made on the model's device: same seed, same device type, same weights."""
    import torch

    generator = torch.Generator(device=model.embed_tokens.device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(("norm", "scalar")):
            weight.data.fill_(1)
        else:
            weight.data.normal_(0, DUMMY_STD, generator=generator)


def fill_from_files(model: Decoder, files: list[Path], *, show_progress: bool | None = None) -> None:
    """Stream tensors from safetensors files into the fused weights, one at a time. Raises ConfigError."""
    from draftloop.models.tensors import open_tensors

    destinations = model.destinations()
    with open_tensors(files) as tensors:
        skipped = model.needless(tensors.shapes) | mtp_tensors(tensors.shapes, model.config.num_layers)
        check_tensors(tensors, destinations, skipped, files[0].parent)
        for file in progress_bar(files, "Loading safetensors checkpoint shards", "file", show=show_progress):
            for name, owner in tensors.files.items():
                if owner == file and name in destinations:
                    destinations[name].copy_(tensors.read(name))


def mtp_tensors(names: Iterable[str], num_layers: int) -> set[str]:
    """Those of multi-token-prediction heads, which checkpoints keep beside the model's `num_layers` layers.

    They are `mtp.*` (Qwen), `model.mtp_layers.*` (MiMo), or decoder layers past the last that have an
    `eh_proj` (DeepSeek). The model does not need them; see drafters/mtp.py.
    """
    names = list(names)
    beyond = {name.removesuffix("eh_proj.weight") for name in names if re.fullmatch(_EH_PROJ, name)}
    layers = tuple(prefix for prefix in beyond if int(prefix.split(".")[2]) >= num_layers)
    return {name for name in names if name.startswith(("mtp.", "model.mtp_layers.", *layers))}


_EH_PROJ = r"model\.layers\.\d+\.eh_proj\.weight"


def check_tensors(tensors: Tensors, destinations: dict[str, Tensor], skipped: set[str], folder: Path) -> None:
    """Compare the files' headers with what the model needs; reads no weights. Raises ConfigError."""
    from draftloop.models.tensors import FLOAT_TYPES

    needless = {name for name in tensors.shapes if name in skipped or name.endswith("rotary_emb.inv_freq")}
    found = {name: list(shape) for name, shape in tensors.shapes.items() if name not in needless}
    wrong = [
        f"{name} is of type {tensors.types[name]}, supported: {', '.join(FLOAT_TYPES)}"
        for name in found
        if tensors.types[name] not in FLOAT_TYPES
    ]
    for name, destination in destinations.items():
        expected = list(destination.shape)
        if name not in found:
            wrong.append(f"{name} {expected} is missing")
        elif found[name] != expected:
            wrong.append(f"{name} has shape {found[name]}, but config.json asks for {expected}")
    wrong += [f"{name} {shape} is unexpected" for name, shape in found.items() if name not in destinations]
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ConfigError(
            f"the weights in {folder} do not fit config.json: {'; '.join(wrong[:MAX_NAMED])}{more}. "
            "Check that both are of the same model"
        )


def _folder(source: ModelSource) -> Path:
    if source.folder is None:
        raise ConfigError(f"{source.name!r} is a shape without files; load_format must be 'dummy' for random weights")
    return source.folder
