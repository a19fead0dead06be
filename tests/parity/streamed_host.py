"""streamed_pass.cu on the host, and what it is given there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from host_kernels import HostKernel
from streamed_cases import Case, make_batch, make_cache, make_decoder, run_pass
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.triton import TritonBackend
from draftloop.kernels.streamed_pass import PassBatch, PassWeights, Scratch, fill_in, kernel_layers
from draftloop.kernels.streamed_plan import MAX_TOKENS, definitions, make_plan, trying
from draftloop.kernels.tensor_map import Box
from draftloop.models import streamed
from draftloop.models.dense import DenseDecoder


def find_weights(model: DenseDecoder, batch: AttentionBatch) -> PassWeights | None:
    """What the kernel would read, had the decoder the backend that GPUs have."""
    embedded_TC = torch.zeros(len(batch.positions_T), model.config.hidden_size, dtype=torch.bfloat16)
    backend = TritonBackend(model.backend.shape, torch.device("cpu"))
    return streamed.streamed_weights(
        model.decoder_layers, model.final_norm, model.cos_sin_tables, embedded_TC, batch, backend
    )


def stand_in_map(box: Box) -> bytes:
    """Four dimensions whatever there are."""
    missing = (1,) * (4 - len(box.sizes))
    numbers = (*box.sizes, *missing, *box.strides, *missing, *box.box, *missing, box.is_swizzled)
    return b"".join(int(n).to_bytes(8, "little") for n in (box.tensor.data_ptr(), *numbers)).ljust(128, b"\0")


class HostPass:
    """A pass that can be run again: counters go on from where they were."""

    def __init__(self, case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = torch.device("cpu")
        plan = make_plan(case.shape, case.num_sms)
        assert plan is not None
        model, batch = make_decoder(case, device), make_batch(case, device)
        self.plain_cache = make_cache(case, batch, device)
        self.cache = self.plain_cache.clone()
        self.expected = run_pass(model, batch, self.plain_cache)
        sizes = definitions(case.shape, plan, max_query_len=batch.max_query_len, page_size=case.page_size)
        self._kernel = HostKernel("streamed_pass_host.cpp", sizes, folder)

        monkeypatch.setattr(streamed, "sm_count", lambda _: case.num_sms)
        with trying(MAX_TOKENS):
            weights = find_weights(model, batch)
        assert weights is not None
        assert weights.shape == case.shape
        scratch = Scratch(case.shape, plan, device)
        table = kernel_layers(weights, list(self.cache), plan, stand_in_map)
        aligned = torch.zeros(len(table) + 64, dtype=torch.uint8)
        start = -aligned.data_ptr() % 64
        aligned[start:][: len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)

        embedded = self.expected[1]
        self.out = torch.full_like(embedded, torch.nan)
        self.residuals = embedded.new_full((case.num_layers, *embedded.shape), torch.nan)
        tables = PassBatch(**{name: getattr(batch, name) for name in PassBatch._fields})
        place = aligned.data_ptr() + start
        one = fill_in(weights, place, scratch, embedded, self.out, self.residuals, tables, plan.num_blocks)
        self._num_blocks, self._pass = plan.num_blocks, one
        self._kept = (model, batch, weights, scratch, aligned, tables)  # what the pass has addresses of
        sets_SN = scratch.tensors["hidden"].untyped_storage()
        self._kernel.watch(
            out=self.out,
            residuals=self.residuals,
            cache=self.cache,
            counter=scratch.tensors["counter"],
            handed_on=torch.tensor([], dtype=torch.uint8).set_(sets_SN),
        )

    def run(self, seed: int, forgotten: str = "nothing") -> list[str]:
        """Races (`HostKernel.launch`)."""
        return self._kernel.launch(self._num_blocks, seed, ctypes.byref(self._pass), forgotten=forgotten)

    def found(self) -> list[Tensor]:
        """As `run_pass` has it."""
        return [self.out, self.expected[1], *self.residuals]
