"""A draft vocabulary: the ids that the target says most often.

Shape suffixes: V vocabulary, W draft vocabulary, C hidden size of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frequent_ids(counts_V: Tensor, size: int) -> Tensor:
    """int64 [W]: the `size` most frequent ids, the lowest ones on ties, in order."""
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values


def map_tensors(ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t`, how far each draft id is from the target's, and `t2d`, which ids are drafted."""
    ids_W = ids_W.cpu()
    known_V = torch.zeros(vocab_size, dtype=torch.bool)
    known_V[ids_W] = True
    return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": known_V}


@torch.no_grad()
def is_known(hidden: Tensor, lm_head_VC: Tensor, ids_W: Tensor) -> Tensor:
    """bool [B, ...]: the target's most likely next id, from its hidden states [B, ..., C], is in the vocabulary."""
    known_V = torch.zeros(lm_head_VC.shape[0], dtype=torch.bool, device=ids_W.device)
    known_V[ids_W] = True
    return torch.stack([known_V[(row @ lm_head_VC.T).argmax(-1)] for row in hidden])
