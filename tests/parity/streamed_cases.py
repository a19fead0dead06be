"""Models and passes for the tests of a pass of few tokens in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.registry import attention_backend
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.kernels.streamed_plan import BF16, FP8, INT4, INT4_ZEROS, Format, Shape
from draftloop.models.decoder import FINAL_HIDDEN
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec
from draftloop.models.presets import PRESETS
from draftloop.models.quantisation import Quantisation, online

LLAMA_8B, LLAMA_1B = Shape(4096, 14336, 32, 8, 128), Shape(2048, 8192, 32, 8, 64)
SMOLLM2 = Shape(576, 1536, 9, 3, 64)
MAX_POSITIONS = 16384


class Case(NamedTuple):
    """A model, and a pass: how many tokens each row has, and how many keys there are behind them."""

    shape: Shape
    num_layers: int
    page_size: int
    query_lens: list[int]
    old_lens: list[int | None]
    """None: a row of padding."""
    uniform: bool = True
    padding: int = 0
    """Tokens behind those of the last row."""
    num_sms: int = 8


CASES = [
    # 4 splits; the last tile and the last page are not full
    Case(Shape(128, 192, 4, 2, 64), 3, 16, [5], [71]),
    # a split for each row, a tile that is full, no keys but one's own, padding; an odd number of heads
    Case(Shape(192, 128, 3, 1, 128), 2, 32, [1] * 8, [0, 16, 17, None, 1, 33, 64, 40]),
    # more tiles than warps; 32 queries; several passes over an odd number of gates
    Case(Shape(128, 640, 4, 1, 64), 2, 64, [8], [610], num_sms=4),
    # rows of unequal lengths, one without tokens, and tokens without a row
    Case(Shape(64, 64, 2, 2, 64), 2, 16, [3, 0, 2], [30, 40, 7], uniform=False, padding=2, num_sms=16),
    # stages of fewer units than warps, which take turns
    Case(Shape(512, 256, 2, 1, 64, INT4), 1, 16, [3], [20], num_sms=4),
    # a zero point for each group; odd numbers of tiles
    Case(Shape(128, 128, 1, 1, 128, INT4_ZEROS), 1, 16, [2, 1], [9, 3], uniform=False, num_sms=16),
    # blocks without rows of o and down
    Case(Shape(256, 384, 4, 1, 64, FP8), 2, 16, [2, 2], [9, 3], num_sms=6),
    # more layers than there are sets of what is handed on
    Case(Shape(64, 64, 1, 1, 64), 6, 16, [2], [20], num_sms=2),
]


REAL_SHAPES = [
    Case(LLAMA_8B, 2, 16, [6], [640]),
    Case(LLAMA_8B, 2, 16, [1], [8123]),
    Case(LLAMA_8B, 2, 16, [1] * 8, [640, 1, 300, 17, None, 2500, 16, 640]),
    Case(LLAMA_1B, 3, 16, [1], [513]),
    Case(LLAMA_1B, 3, 32, [4, 4], [513, 90]),
    Case(SMOLLM2, 4, 16, [6], [640]),
    *(
        Case(shape._replace(weights=weights), 2, 16, query_lens, [640, 33, 9][: len(query_lens)])
        for shape in (LLAMA_8B, LLAMA_1B)
        for weights, query_lens in ((INT4, [1]), (INT4, [6]), (INT4_ZEROS, [2, 2, 2]), (FP8, [1]), (FP8, [6]))
    ),
]


def name(case: Case) -> str:
    groups = "real_shapes-" * (case in REAL_SHAPES)
    return f"{groups}{'-'.join(map(str, case.shape[:5]))}-{case.shape.weights.name}-{case.query_lens}"


def make_decoder(case: Case, device: torch.device, **changes: object) -> DenseDecoder:
    torch.manual_seed(3)
    hidden, inner, num_heads, num_kv_heads, head_dim, weights = case.shape
    config = replace(
        PRESETS["tiny"], hidden_size=hidden, intermediate_size=inner, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, num_layers=case.num_layers,
    )  # fmt: skip
    config = replace(config, **{"quantisation": quantisation_to(weights), **changes})
    shape = attention_shape(config, page_size=case.page_size, dtype=torch.bfloat16)
    backend = attention_backend("triton" if device.type == "cuda" else "sdpa", device.type)(shape, device)
    model = DenseDecoder(config, backend, device=device, dtype=torch.bfloat16, max_positions=MAX_POSITIONS)
    for name, weight in model.named_parameters():
        spread = 0.1 if name.endswith("norm") else weight.shape[-1] ** -0.5
        if weight.dtype is torch.bfloat16:
            weight.data.normal_(mean=float(name.endswith("norm")), std=spread)
    for weight in (one for one in model.modules() if isinstance(one, QuantisedWeight)):
        values = weight.quantise(torch.randn(*weight.shape, device=device) * weight.shape[1] ** -0.5)
        if weights == INT4_ZEROS:
            values = values._replace(zero_NG=torch.randint_like(values.scale_NG, 5, 12).to(torch.uint8))
        weight.fill(0, values)
    return model


def quantisation_to(weights: Format) -> Quantisation | None:
    if weights == BF16:
        return None
    plain = online("fp8" if weights == FP8 else "int4")
    groups = tuple((names, replace(scheme, has_zeros=weights == INT4_ZEROS)) for names, scheme in plain.groups)
    return replace(plain, groups=groups)


def make_batch(case: Case, device: torch.device) -> AttentionBatch:
    """Pages of rows stand in reverse order, behind page 0."""
    rows, page_size = len(case.query_lens), case.page_size
    lengths = [0 if old is None else old + new for old, new in zip(case.old_lens, case.query_lens, strict=True)]
    width = max(-(-max(lengths) // page_size), 1)
    table_RN = torch.arange(rows * width, 0, -1, dtype=torch.int32).view(rows, width)
    positions, slots = [], []
    for row, (old, count) in enumerate(zip(case.old_lens, case.query_lens, strict=True)):
        for position in range(old or 0, (old or 0) + count):
            page = 0 if old is None else int(table_RN[row, position // page_size])
            positions.append(position)
            slots.append(page * page_size + position % page_size)
    positions, slots = positions + [0] * case.padding, slots + [0] * case.padding
    starts = torch.tensor([0, *case.query_lens]).cumsum(0)
    batch = AttentionBatch(
        rows_R=torch.arange(rows, dtype=torch.int32),
        query_starts_R1=starts.int(),
        kv_lens_R=torch.tensor(lengths, dtype=torch.int32),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        page_table_MN=table_RN,
        max_query_len=max(case.query_lens),
        uniform=case.uniform,
    )
    tensors = {name: one.to(device) for name, one in vars(batch).items() if isinstance(one, Tensor)}
    return replace(batch, **tensors)


def make_cache(case: Case, batch: AttentionBatch, device: torch.device) -> Tensor:
    """What stands behind the old keys is no number."""
    spec = cache_spec(make_config(case), torch.bfloat16)
    num_pages = batch.page_table_MN.numel() + 1
    sizes = (spec.num_layers, 2, num_pages, case.page_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.full(sizes, torch.nan, dtype=torch.bfloat16)
    for row, old in enumerate(case.old_lens):
        position = torch.arange(old or 0)
        pages = batch.page_table_MN.cpu()[row, position // case.page_size].long()
        cache[:, :, pages, position % case.page_size] = torch.randn(
            spec.num_layers, 2, len(position), spec.num_kv_heads, spec.head_dim
        ).bfloat16()
    return cache.to(device)


def make_config(case: Case):
    return replace(
        PRESETS["tiny"], num_layers=case.num_layers, num_heads=case.shape.num_heads,
        num_kv_heads=case.shape.num_kv_heads, head_dim=case.shape.head_dim, hidden_size=case.shape.hidden,
    )  # fmt: skip


def run_pass(model: DenseDecoder, batch: AttentionBatch, cache: Tensor) -> list[Tensor]:
    """The hidden states, and the residual stream in front of each layer and behind the last."""
    token_ids_T = torch.arange(len(batch.positions_T), device=cache.device) + 7
    layers = (*range(model.config.num_layers + 1), FINAL_HIDDEN)
    hidden_TC, aux = model.forward(token_ids_T, model.layer_caches((cache,)), batch, aux_layers=layers)
    assert torch.equal(aux.pop(), hidden_TC)
    return [hidden_TC, *aux]


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def check(case: Case, found: Sequence[Tensor], expected: Sequence[Tensor], cache: Tensor, plain_cache: Tensor) -> None:
    """All but the results of padding, which are anything."""
    rows = torch.arange(len(case.query_lens)).repeat_interleave(torch.tensor(case.query_lens)).tolist()
    live = [token for token, row in enumerate(rows) if case.old_lens[row] is not None]
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert distance(one[live], other[live]) < 5e-3 * (2 + case.num_layers), f"tensor {index} of {len(found)}"
    for layer in range(case.num_layers):
        for side in range(2):
            # page 0 is nobody's
            one, other = (tensor[layer, side, 1:].nan_to_num(7) for tensor in (cache, plain_cache))
            assert distance(one, other) < 1e-2, f"{('keys', 'values')[side]} of layer {layer}"
