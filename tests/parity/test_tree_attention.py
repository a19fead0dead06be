"""Attention over trees of drafts, by every backend, against what is written out here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCE, Case, attend_in_splits, backend, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.attention.base import AttentionBackend
from draftloop.attention.registry import attention_backend
from draftloop.attention.tree import TreePass
from draftloop.config.draft_tree import DraftTree
from draftloop.errors import ConfigError
from draftloop.graphs.tape import TapeRecorder
from draftloop.kernels.paged_attention import PagedTree
from trees import SMALL, random_tree, tree_passes

FEW = settings(max_examples=6)
SEEDS = st.integers(0, 10**6)


def dense(q_QHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, seen: list[list[int]], case: Case) -> Tensor:
    """Softmax attention of one row in fp32; `seen`: the keys of each token."""
    out = torch.zeros(q_QHD.shape)
    for token, keys in enumerate(seen):
        for head in range(case.heads):
            kv_head = head // (case.heads // case.kv_heads)
            score = k_SGD[keys, kv_head].float() @ q_QHD[token, head].float() / math.sqrt(case.head_dim)
            out[token, head] = torch.softmax(score, 0) @ v_SGD[keys, kv_head].float()
    return out


def passes(tree: DraftTree) -> list[tuple[list[tuple[int, ...]], int]]:
    """What the block and each level bring: the keys of the tree that each token sees, and how many there are."""
    block = list(tree.paths)
    inner = [place for place in range(1, tree.num_places) if tree.num_children[place]]
    found = [(block, tree.num_places)]
    for level in tree.levels[1:]:
        seen = [tuple(inner.index(p) for p in tree.paths[place][1:]) for place in level.places]
        found.append((seen, inner.index(level.places[-1]) + 1))
    return found


def check_attention(
    name: str,
    tree: DraftTree,
    which: int,
    befores: list[int | None],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    num_splits: int | None = None,
    window: int | None = None,
    **shape: int,
) -> None:
    """Rows with so many keys before their tree; None is a padding row."""
    seen, num_keys = passes(tree)[which]
    of = tree_passes(tree, device)[which]
    num_queries = len(seen)
    lens = tuple((num_queries, 0 if before is None else before + num_keys) for before in befores)
    case = Case(lens=lens, uniform=True, seed=num_keys, **shape)
    q, kv, batch, _ = make(case, device, dtype)
    expected = torch.zeros(q.shape)
    positions = torch.zeros(q.shape[0], dtype=torch.int64, device=device)
    for entry, before in enumerate(befores):
        if before is None:
            continue
        pages = batch.page_table_MN[batch.rows_R[entry].item()].long()
        keys, values = (kv[side][pages[pages > 0]].flatten(0, 1).cpu() for side in (0, 1))
        mine = slice(entry * num_queries, (entry + 1) * num_queries)
        heights = [len(path) - 1 for path in seen]
        positions[mine] = torch.tensor([before + height for height in heights])
        first = [0 if window is None else max(0, before + height - window + 1) for height in heights]
        visible = [
            [*range(start, before), *(before + key for key in path)] for start, path in zip(first, seen, strict=True)
        ]
        expected[mine] = dense(q[mine].cpu(), keys, values, visible, case)
        if window is not None:  # pages behind it may be another row's
            kv[:, pages[: max(0, before - window + 1) // case.page_size]] = float("nan")
    batch = replace(batch, tree=of.mask, positions_T=positions)
    out = torch.full_like(q, float("nan"))
    if num_splits is None:
        backend(name, case, device, dtype).attend(q, kv, batch, out, sliding_window=window)
    else:
        how = {"causal": True, "window": window or 0, "tree": PagedTree(*of.mask, positions)}
        attend_in_splits(q, kv, batch, out, case, num_splits, query_len=num_queries, **how)
    torch.testing.assert_close(out.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


NAMES = pytest.mark.parametrize("name", ["sdpa", "triton"])
FULL = DraftTree.of_choices([*((rank,) for rank in range(9)), *((rank // 6, rank % 6) for rank in range(54))])
"""As many places as a mask has bits."""


@NAMES
@FEW
@given(seed=SEEDS, data=st.data())
def test_each_token_sees_what_comes_before_the_tree_and_its_ancestors(name, device, seed, data):
    tree = random_tree(seed, most=20)
    which = data.draw(st.integers(0, len(passes(tree)) - 1))
    befores = data.draw(st.lists(st.none() | st.integers(0, 60), min_size=1, max_size=3))
    window = data.draw(st.none() | st.integers(tree.depth + 1, 40))
    check_attention(name, tree, which, befores, device, window=window)


@NAMES
def test_a_tree_as_large_as_may_be(name, device):
    assert FULL.num_places == 64
    for which in range(2):
        check_attention(name, FULL, which, [0, 33], device)


@pytest.mark.parametrize("num_splits", [2, 5])
def test_splits_of_the_keys(device, num_splits):
    for window in (None, 20):
        check_attention("triton", SMALL, 0, [150, 3, None], device, num_splits=num_splits, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (8, 4, 256)], ids=str)
def test_trees_over_model_shapes(dtype, heads, kv_heads, head_dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for tree in (random_tree(3), SMALL, FULL):
        for which in range(len(passes(tree))):
            check_attention("triton", tree, which, [700], torch.device("cuda"), dtype=dtype, **shape)
            check_attention("triton", tree, which, [1000, None, 63, 300], torch.device("cuda"), dtype=dtype, **shape)


def test_a_tape_of_a_tree_follows_lengths():
    """One op that reads the lengths of each replay."""
    device, mask = torch.device("cpu"), TreePass.block(SMALL, torch.device("cpu")).mask
    case = Case(lens=((SMALL.num_places, 35), (SMALL.num_places, 20)), uniform=True)
    q, kv, batch, _ = make(case, device, torch.float32)
    batch = replace(batch, tree=mask)
    sdpa, eager, out = backend("sdpa", case, device, torch.float32), torch.empty_like(q), torch.empty_like(q)
    sdpa.attend(q, kv, batch, eager, sliding_window=None)
    lens = batch.kv_lens_R.clone()
    batch.kv_lens_R.copy_(torch.tensor([9, 0]))
    tape = TapeRecorder().record(lambda _: sdpa.attend(q, kv, batch, out, sliding_window=None), piecewise=False)
    batch.kv_lens_R.copy_(lens)
    tape.replay()
    assert torch.equal(out, eager)


def test_backends_say_which_trees_they_take():
    flashinfer: type[AttentionBackend] = attention_backend("flashinfer", "cuda")
    with pytest.raises(ConfigError, match="flashinfer has no mask for trees"):
        flashinfer.check_tree(SMALL, None)
    flashinfer.check_tree(DraftTree.chain(7), None)
    triton = attention_backend("triton", "cuda")
    triton.check_tree(SMALL, 4)
    with pytest.raises(ConfigError, match="3 drafts deep, but some layers see 3 tokens only"):
        triton.check_tree(SMALL, 3)
