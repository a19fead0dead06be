"""Device memory whose addresses come first: graphs are captured over a cache before anybody knows its size.

A graph holds the addresses of the cache, and the cache gets what memory the graphs leave. So addresses for as many
pages as there could be are reserved, all graphs are captured over them, and then as many pages get memory as there
is room for. Nothing has to be estimated, and nothing is captured twice.

Source: CUDA C++ Programming Guide, "Virtual Memory Management".
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftloop.errors import CapacityError, ConfigError
from draftloop.kernels.driver import DriverError, ask, bindings

if TYPE_CHECKING:
    from draftloop.kvcache.pool import CacheSpec


class VirtualMemory(ABC):
    """Addresses of one device, and memory behind them. Sizes are in bytes."""

    granule: int
    """Addresses and sizes are multiples of it."""

    @abstractmethod
    def reserve(self, size: int) -> int:
        """The first of `size` addresses that nobody else gets. They cost no memory."""

    @abstractmethod
    def back(self, address: int, size: int) -> None:
        """Put memory behind reserved addresses. Raises CapacityError if there is none."""

    @abstractmethod
    def release(self, address: int, size: int, backed: list[tuple[int, int]]) -> None:
        """Give back reserved addresses, and the memory of those (address, size) among them that were backed."""

    @abstractmethod
    def tensor(self, addresses: AddressRange) -> Tensor:
        """All of them as bytes, uint8 [size]. The tensor keeps `addresses` alive."""


class AddressRange:
    """Reserved addresses, given back with their memory when nobody uses them any more."""

    def __init__(self, size: int, memory: VirtualMemory) -> None:
        self.size, self._memory, self.address = size, memory, memory.reserve(size)
        self._backed: list[tuple[int, int]] = []
        # at exit the device takes all back by itself
        weakref.finalize(self, memory.release, self.address, size, self._backed).atexit = False

    def back(self, offset: int, size: int) -> None:
        """Put memory behind a part that has none. Raises CapacityError if there is none."""
        self._memory.back(self.address + offset, size)
        self._backed.append((self.address + offset, size))


class ReservedCache:
    """One model's cache: each layer's keys, and its values, are a plane whose pages get memory from page 0 on."""

    def __init__(self, spec: CacheSpec, num_pages: int, page_size: int, memory: VirtualMemory) -> None:
        """Reserves addresses for `num_pages` pages, or some more: a plane begins where memory can."""
        self._num_planes, self._granule = spec.num_layers * 2, memory.granule
        self._page_bytes = spec.bytes_per_page(page_size) // self._num_planes
        step = memory.granule // gcd(memory.granule, self._page_bytes)
        most_pages = -(-num_pages // step) * step
        self._plane_bytes = most_pages * self._page_bytes
        self._range = AddressRange(self._num_planes * self._plane_bytes, memory)
        self._backed = 0  # bytes of each plane
        self._map(self._rounded(1))  # else torch would not take the addresses for the device's
        self._bytes_NB = memory.tensor(self._range).view(self._num_planes, self._plane_bytes)
        self._zero(0, self._backed)
        shape = (spec.num_layers, 2, most_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.cache = self._bytes_NB.view(spec.dtype).view(shape)
        """[L, 2, P, S, G, D], to be used as far as there is memory: the null page at first."""

    def nbytes_of(self, num_pages: int) -> int:
        """What memory so many pages take."""
        return self._num_planes * self._rounded(num_pages)

    def back(self, num_pages: int) -> None:
        """Give memory, filled with zeros, to the first `num_pages` pages. Raises CapacityError if there is none."""
        begin, end = self._backed, self._rounded(num_pages)
        if end > begin:
            self._map(end)
            self._zero(begin, end)

    def _map(self, end: int) -> None:
        """Put memory behind each plane, up to its byte `end`."""
        for plane in range(self._num_planes):
            self._range.back(plane * self._plane_bytes + self._backed, end - self._backed)
        self._backed = end

    def _zero(self, begin: int, end: int) -> None:
        for plane_B in self._bytes_NB:  # one by one: what is contiguous is filled at the memory's speed
            plane_B[begin:end].zero_()

    def _rounded(self, num_pages: int) -> int:
        return -(-num_pages * self._page_bytes // self._granule) * self._granule


class CudaVirtualMemory(VirtualMemory):
    """The driver's."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where the driver, or this installation, has none."""
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.synchronize(self._device)  # the driver is ready after that
        try:
            driver = bindings()
            self._kind, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
            self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            for location in (self._kind.location, self._access.location):
                location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                location.id = self._device.index
            self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            self.granule = int(ask("cuMemGetAllocationGranularity", self._kind, smallest))
        except (ImportError, DriverError) as error:
            raise ConfigError(
                f"the size of the key/value cache cannot follow from what graphs leave ({error}); install "
                "cuda-bindings, which torch's CUDA builds bring along, or set --kv-cache-memory-bytes"
            ) from error

    def reserve(self, size: int) -> int:
        return int(ask("cuMemAddressReserve", size, 0, 0, 0))

    def back(self, address: int, size: int) -> None:
        try:
            handle = ask("cuMemCreate", size, self._kind, 0)
        except DriverError as error:
            raise CapacityError(f"no {size / 2**20:.0f} MiB for the key/value cache: {error}") from error
        try:
            ask("cuMemMap", address, size, 0, handle, 0)
        finally:
            ask("cuMemRelease", handle)  # what is mapped stays until it is unmapped
        ask("cuMemSetAccess", address, size, [self._access], 1)

    def release(self, address: int, size: int, backed: list[tuple[int, int]]) -> None:
        try:
            torch.cuda.synchronize(self._device)  # kernels may use it yet
        except RuntimeError:
            return  # the device is gone, and its memory with it
        for part in backed:
            ask("cuMemUnmap", *part)
        ask("cuMemAddressFree", address, size)

    def tensor(self, addresses: AddressRange) -> Tensor:
        return torch.as_tensor(_DeviceArray(addresses), device=self._device)


class _DeviceArray:
    """Device addresses in the form that torch adopts without a copy."""

    def __init__(self, addresses: AddressRange) -> None:
        self._addresses = addresses
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (addresses.size,),
            "typestr": "|u1",
            "data": (addresses.address, False),
            "version": 3,
        }
