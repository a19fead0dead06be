"""Any decoder-only model of transformers: its own modelling code around our paged attention and cache.

transformers lets a model's attention be replaced by a registered function (its `AttentionInterface`). Ours writes keys
and values to the pages and attends to them, so passes look like those of our own decoders: no cache of transformers',
no mask, one sequence of T tokens whatever rows they belong to. Slower than a decoder of ours, whose kernels are fused.

Shape suffixes: T tokens in the pass, C hidden size, V vocabulary, H query heads, G key/value heads, D head size,
P pages, S tokens per page.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.errors import ConfigError
from draftloop.kernels.fp8_cache import as_bytes, stored
from draftloop.models.decoder import FINAL_HIDDEN, Decoder, LayerCaches, capped
from draftloop.models.fallback_config import FallbackConfig
from draftloop.models.fill import warn_of_rounding
from draftloop.models.tensors import open_tensors
from draftloop.models.weights import Destination

logger = logging.getLogger(__name__)

ATTENTION = "draftloop"
"""Name of our attention among transformers'."""
UNKNOWN_TERMS = ("s_aux", "position_bias", "alibi")
"""What some models add to scores, which no backend here does."""


def _table(layer: torch.nn.Module | None) -> Tensor:
    weight = None if layer is None else layer.weight
    if not isinstance(weight, Tensor):
        raise ConfigError("it has no table of embeddings, or no output head of one matrix")
    return weight


class _Pass(threading.local):
    """What attention layers and hooks of one model need to know of the pass that runs.

    Each thread has its own: kernels are warmed up by passes side by side, and not all of transformers' code hands on
    what a caller gives to its attention.
    """

    batch: AttentionBatch | None = None
    aux_layers: tuple[int, ...] = ()

    def __init__(self, backend: AttentionBackend) -> None:
        """Called in every thread that uses it."""
        self.backend = backend
        self.caches: LayerCaches = ()
        self.aux: dict[int, Tensor] = {}
        self.attended: list[int] = []


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D].

    Raises ConfigError for attention that the backends do not have.
    """
    current: _Pass = module.draftloop_pass
    backend, batch = current.backend, current.batch
    shape = backend.shape
    assert batch is not None
    sizes = ((shape.num_heads, shape.head_dim), *((shape.num_kv_heads, shape.head_dim),) * 2)
    if tuple((x.shape[1], x.shape[3]) for x in (query, key, value)) != sizes:
        raise ConfigError("its attention has heads of other numbers or sizes than its config says")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ConfigError("its attention is not causal")
    if (softcap or 0.0) != shape.soft_cap or any(more.get(name) is not None for name in UNKNOWN_TERMS):
        raise ConfigError("its attention adds terms to scores, or caps them in a way that its config does not say")
    # in the order [T, heads, D], as pages keep them
    q_THD, keys_TGD, values_TGD = (x[0].transpose(0, 1).to(shape.dtype) for x in (query, key, value))
    scaling = shape.head_dim**-0.5 if scaling is None else scaling
    q_THD = (q_THD if scaling == shape.scale else q_THD * (scaling / shape.scale)).contiguous()
    kv_2PSGD = current.caches[module.layer_idx]
    for side, rows in zip(as_bytes(kv_2PSGD).flatten(1, 2).unbind(0), (keys_TGD, values_TGD), strict=True):
        side.index_copy_(0, batch.slots_T, stored(rows, kv_2PSGD))
    # allocated here: a piecewise graph breaks at the call, and its next segment reads this memory
    out_THD = torch.empty_like(q_THD)
    batch.attend(lambda: backend.attend(q_THD, kv_2PSGD, batch, out_THD, sliding_window=sliding_window))
    current.attended.append(module.layer_idx)
    return out_THD[None].to(query.dtype), None


AttentionInterface.register(ATTENTION, attend)


class _Given(torch.nn.Module):
    """In the place of a model's body: hidden states that are known already."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class FallbackDecoder(Decoder):
    """A model of transformers with weights, made by `load_fallback`. Raises ConfigError where it cannot run so."""

    def __init__(self, config: FallbackConfig, backend: AttentionBackend, model: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.backend, self.model = config, backend, model.eval().requires_grad_(False)
        body = model.base_model
        self.embed_tokens, self.lm_head = _table(model.get_input_embeddings()), _table(model.get_output_embeddings())
        shape = (config.hidden_size,)
        norms = [weight for part in body.children() for weight in part.parameters(False) if weight.shape == shape]
        self.final_norm = norms[-1] if norms else torch.ones(shape)
        self._pass = _Pass(backend)
        for module in body.modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["draftloop_pass"] = self._pass  # neither a module nor a weight
        # transformers' code from hidden states to logits, whatever it does there
        head = copy.copy(model)
        head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _Given()}
        self._head = (head,)  # in a tuple: it is no module of this one
        self._watch_layers(body)

    def _watch_layers(self, body: torch.nn.Module) -> None:
        """Keep the residual stream between layers, where it is asked for."""
        count = self.config.num_layers
        stacks = (part for part in body.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == count)
        layers = next(stacks, None)
        if layers is None:
            raise ConfigError("its layers cannot be found")

        def keep(index: int, state_1TC: Tensor) -> None:
            if index in self._pass.aux_layers:
                self._pass.aux[index] = state_1TC[0]

        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: keep(index, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        layers[-1].register_forward_hook(lambda _, args, out: keep(count, out[0] if isinstance(out, tuple) else out))

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token_ids_T)

    def forward(
        self, token_ids_T: Tensor, caches: LayerCaches, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        current = self._pass
        current.caches, current.batch, current.aux_layers, current.aux = caches, batch, aux_layers, {}
        current.attended.clear()
        out = self.model.base_model(
            input_ids=token_ids_T[None], position_ids=batch.positions_T[None], use_cache=False, return_dict=True
        )
        hidden_TC = out.last_hidden_state[0]
        aux = {**current.aux, FINAL_HIDDEN: hidden_TC}
        return hidden_TC, [aux[index] for index in aux_layers]

    def logits(self, hidden_TC: Tensor, *, out_TW: Tensor | None = None) -> Tensor:
        (head,) = self._head
        logits_1TW = head(inputs_embeds=hidden_TC[None], use_cache=False, return_dict=True).logits
        return capped(logits_1TW[0].to(hidden_TC.dtype), None, out_TW)  # some models' code makes them fp32

    def destinations(self, names: Iterable[str] = ()) -> dict[str, Destination]:
        return {name: weight.data for name, weight in self.model.named_parameters()}

    @torch.inference_mode()
    def check(self) -> None:
        """Run one token. Raises ConfigError unless every layer attends once, by our attention."""
        device, shape = self.lm_head.device, self.backend.shape
        sizes = (self.config.num_layers, 2, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        zero, one = (torch.tensor([n], device=device) for n in (0, 1))
        batch = AttentionBatch(
            rows_R=zero.int(),
            query_starts_R1=torch.tensor([0, 1], dtype=torch.int32, device=device),
            kv_lens_R=one.int(),
            positions_T=zero,
            slots_T=one * shape.page_size,
            page_table_MN=one[None].int(),
            max_query_len=1,
            uniform=True,
        )
        hidden_TC, _ = self(zero, torch.zeros(sizes, dtype=shape.kv_dtype, device=device).unbind(0), batch)
        if sorted(self._pass.attended) != list(range(self.config.num_layers)):
            raise ConfigError("not each of its layers asks for attention, once")
        if self.logits(hidden_TC).shape != (1, self.config.vocab_size):
            raise ConfigError("its logits are not one number per token of its vocabulary")


def load_fallback(
    folder: Path,
    config: FallbackConfig,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    files: Sequence[Path],
    seed: int,
    show_progress: bool | None,
) -> FallbackDecoder:
    """With the weights in these `files` of the folder, or random ones where there are none.

    Raises ConfigError for weights that do not fit the config.
    """
    if config.quantisation is not None:
        raise ConfigError(
            f"quantization is {config.quantisation.method!r}, but {config.architecture} runs by transformers' code, "
            "whose weights stay plain; leave it out"
        )
    if show_progress is False:
        transformers_logging.disable_progress_bar()
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "trust_remote_code": False}
    try:
        if not files:
            from transformers import AutoConfig

            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)), **settings)
        else:
            with open_tensors(files) as tensors:
                warn_of_rounding({name: (kind, dtype) for name, kind in tensors.types.items()}, folder)
            # None: where there are no others, the pickled ones that were asked for
            safe = True if files[0].suffix == ".safetensors" else None
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder), output_loading_info=True, use_safetensors=safe, **settings
            )
            if wrong := [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]:
                raise ConfigError(
                    f"the weights in {folder} do not fit config.json: {len(wrong)} are missing or of another shape, "
                    f"among them {sorted(wrong)[0]}. Check that both are of the same model"
                )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"transformers cannot load {folder}: {error}") from error
    try:
        decoder = FallbackDecoder(config, backend, model.to(device))
        decoder.check()
    except Exception as error:  # whatever foreign code trips over
        raise ConfigError(
            f"{config.architecture} cannot run by transformers' code: {error}. Choose another model"
        ) from error
    logger.warning(
        "%s runs by transformers' own code with draftloop's attention and cache, slower than an architecture of "
        "draftloop's own would",
        config.architecture,
    )
    return decoder
