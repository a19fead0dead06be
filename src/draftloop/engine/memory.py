"""What the device's memory is used for, measured as the engine starts, and what is left for pages."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from draftloop.config.engine import EngineConfig
from draftloop.config.resolve import Resolved
from draftloop.distributed.group import ALONE, Group
from draftloop.errors import CapacityError
from draftloop.kvcache.pages import pages_in_sight
from draftloop.kvcache.pool import CachePool, CacheSpec, PageCounts, count_pages
from draftloop.kvcache.virtual_memory import CudaVirtualMemory, VirtualMemory
from draftloop.observability.log import get_logger
from draftloop.scheduler.row_pages import TOKENS_AHEAD, tokens_per_step

CPU_CACHE_SHARE = 0.25
"""Share of the machine's free memory that the cache may take on a CPU."""
SPARE_BYTES = 128 * 2**20
"""Left of a GPU's budget when all else has its memory: for staged requests, and for blocks of activations that torch's
allocator cuts in another way than at the start."""

logger = get_logger(__name__)


class MemoryLedger:
    """Bytes that each part of the start took: of the GPU by its driver, else of the process's resident memory."""

    def __init__(self, device: torch.device, gpu_memory_utilization: float) -> None:
        self.device = device
        self.parts: dict[str, int] = {}
        self.budget_bytes: int | None = None
        """What this engine and all others on the GPU may take together; None on a CPU."""
        if device.type == "cuda":
            self.budget_bytes = int(torch.cuda.mem_get_info(device)[1] * gpu_memory_utilization)
        self.others_bytes = self._last = self.in_use()

    def in_use(self) -> int:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def lap(self, part: str) -> None:
        """What is in use more than at the last call belongs to this part, too."""
        now = self.in_use()
        self.parts[part] = self.parts.get(part, 0) + now - self._last
        self._last = now

    def check_weights(self, nbytes: int, name: str) -> None:
        """Raises CapacityError where weights cannot fit: on a CPU, where Linux would end some process instead."""
        if self.device.type == "cpu" and nbytes > (free := _free_memory()):
            raise CapacityError(
                f"the weights of {name} need {nbytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of memory are free; "
                "use a smaller model, --dtype bfloat16, or --quantization fp8 or int4"
            )

    def left_for_pages(self) -> int:
        """Bytes of the budget that nothing has taken yet."""
        if self.budget_bytes is None:
            return int(_free_memory() * CPU_CACHE_SHARE)
        return self.budget_bytes - self.in_use() - SPARE_BYTES

    def virtual_memory(self) -> VirtualMemory | None:
        """Where a cache may have addresses before it has memory; None on a CPU, which does so by itself."""
        return CudaVirtualMemory(self.device) if self.device.type == "cuda" else None

    def check(self) -> None:
        """Warn where, with everything made, more is used than was allowed."""
        over = self.in_use() - (self.budget_bytes or self.in_use())
        if over > 0:
            logger.warning(
                "memory: %.0f MiB more than --gpu-memory-utilization allows are in use; set --kv-cache-memory-bytes "
                "that much lower, or lower --max-num-seqs or --cudagraph-capture-sizes",
                over / 2**20,
            )

    def format(self) -> str:
        """One line: each part, all together, and the budget."""
        parts = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in self.parts.items())
        text = f"{parts}; together {sum(self.parts.values()) / 2**20:.0f} MiB"
        if self.budget_bytes is not None:
            text += f" beside {self.others_bytes / 2**20:.0f} MiB of others, of {self.budget_bytes / 2**20:.0f} MiB"
        return text


def make_pool(
    config: EngineConfig,
    resolved: Resolved,
    specs: list[CacheSpec],
    ledger: MemoryLedger,
    *,
    pages_per_row: int,
    num_drafts: int,
    group: Group = ALONE,
) -> CachePool:
    """Pages for what memory was asked for, or is left; as many on each rank of `group`.

    Layers with pages of their own have as many as the others, up to what all rows can see: memory that this leaves
    goes to those that keep all tokens.

    On a GPU what is left shows when all graphs are captured, so there pages have but addresses until `fill_pool`.

    Raises CapacityError if not one request fits.
    """
    budget, windows = config.kv_cache_memory_bytes, {spec.window for spec in specs}
    useful_pages = resolved.max_num_seqs * pages_per_row + 1
    most: dict[int | None, int] = {
        window: min(_pages_in_sight_of_all(resolved, window, pages_per_row, num_drafts), useful_pages)
        for window in windows
        if window is not None
    }
    num_pages = count_pages(
        lambda pages: PageCounts(most).nbytes(specs, pages, resolved.block_size),
        budget_bytes=group.min([ledger.left_for_pages()])[0] if budget is None else budget,
        useful_pages=max(most.get(window, useful_pages) for window in windows or {None}),
        least_pages=_least_pages(windows, pages_per_row, num_drafts, resolved.block_size),
    )
    memory = ledger.virtual_memory() if budget is None else None
    return CachePool(specs, num_pages, resolved.block_size, ledger.device, most_pages=most, memory=memory)


def fill_pool(
    pool: CachePool, ledger: MemoryLedger, *, pages_per_row: int, num_drafts: int, group: Group = ALONE
) -> None:
    """Give memory to as many reserved pages as what is left of the budget holds; as many on each rank of `group`.

    Raises CapacityError if not one request fits.
    """
    budget = group.min([ledger.left_for_pages() + pool.nbytes_of(1)])[0]  # the null page has its memory
    least_pages = _least_pages(pool.windows, pages_per_row, num_drafts, pool.page_size)
    pool.back(count_pages(pool.nbytes_of, budget_bytes=budget, useful_pages=pool.num_pages, least_pages=least_pages))


def _least_pages(windows: Iterable[int | None], pages_per_row: int, num_drafts: int, page_size: int) -> int:
    """A pool in which one request runs, whatever its length; of a window it holds what it sees."""
    num_new = tokens_per_step(num_drafts)
    needs = [pages_per_row if w is None else pages_in_sight(w, num_new, page_size) for w in windows]
    return min(max(needs, default=pages_per_row), pages_per_row) + 1


def _pages_in_sight_of_all(resolved: Resolved, window: int, pages_per_row: int, num_drafts: int) -> int:
    """Pages of layers with a window that are of use: what every row sees and may reach before the host looks again,
    the prompt tokens of a step, and as much once more for prefixes to be found in."""
    steps = max(resolved.device_loop, 1) + resolved.pipeline_depth
    num_new = tokens_per_step(num_drafts) + max(steps * (1 + num_drafts), TOKENS_AHEAD)
    per_row = min(pages_in_sight(window, num_new, resolved.block_size), pages_per_row)
    pages = resolved.max_num_seqs * per_row - (-resolved.max_num_batched_tokens // resolved.block_size)
    return 1 + pages * (1 + resolved.prefix_caching)


def _free_memory() -> int:
    """Bytes that the machine can still give."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return sizes["MemAvailable"]
