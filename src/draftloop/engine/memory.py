"""What the device's memory is used for, measured as the engine starts, and what is left for pages."""

from __future__ import annotations

import os

import torch

from draftloop.config.engine import EngineConfig
from draftloop.config.resolve import Resolved
from draftloop.distributed.group import ALONE, Group
from draftloop.errors import CapacityError
from draftloop.kvcache.pool import CachePool, CacheSpec, bytes_per_page, count_pages
from draftloop.kvcache.virtual_memory import CudaVirtualMemory, VirtualMemory
from draftloop.observability.log import get_logger

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
    group: Group = ALONE,
) -> CachePool:
    """Pages for what memory was asked for, or is left; as many on each rank of `group`.

    On a GPU what is left shows when all graphs are captured, so there pages have but addresses until `fill_pool`.

    Raises CapacityError if not one request fits.
    """
    page_bytes = bytes_per_page(specs, resolved.block_size)
    budget = config.kv_cache_memory_bytes
    num_pages = count_pages(
        lambda pages: pages * page_bytes,
        budget_bytes=group.min([ledger.left_for_pages()])[0] if budget is None else budget,
        useful_pages=resolved.max_num_seqs * pages_per_row + 1,
        least_pages=pages_per_row + 1,
    )
    memory = ledger.virtual_memory() if budget is None else None
    return CachePool(specs, num_pages, resolved.block_size, ledger.device, memory=memory)


def fill_pool(pool: CachePool, ledger: MemoryLedger, *, pages_per_row: int, group: Group = ALONE) -> None:
    """Give memory to as many reserved pages as what is left of the budget holds; as many on each rank of `group`.

    Raises CapacityError if not one request fits.
    """
    budget = group.min([ledger.left_for_pages() + pool.nbytes_of(1)])[0]  # the null page has its memory
    pages = count_pages(pool.nbytes_of, budget_bytes=budget, useful_pages=pool.num_pages, least_pages=pages_per_row + 1)
    pool.back(pages)


def _free_memory() -> int:
    """Bytes that the machine can still give."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return sizes["MemAvailable"]
