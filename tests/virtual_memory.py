"""A stand-in for a GPU's memory: addresses of this process that nobody may touch before they are backed."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from draftloop.errors import CapacityError
from draftloop.kvcache.virtual_memory import AddressRange, VirtualMemory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory(VirtualMemory):
    """Of `most` bytes. What is touched without memory behind it ends the process, as it would end a GPU's context."""

    def __init__(self, most: int = 1 << 40, granule: int = mmap.PAGESIZE) -> None:
        self.granule, self.most, self.in_use, self.reserved = granule, most, 0, 0

    def reserve(self, size: int) -> int:
        assert size % self.granule == 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, size, 0, flags, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self.reserved += size
        return address

    def back(self, address: int, size: int) -> None:
        assert size % self.granule == 0
        if self.in_use + size > self.most:
            raise CapacityError(f"{size} bytes asked for, {self.most - self.in_use} free")
        assert _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.in_use += size

    def release(self, address: int, size: int, backed: list[tuple[int, int]]) -> None:
        _libc.munmap(address, size)
        self.reserved -= size
        self.in_use -= sum(size for _, size in backed)

    def tensor(self, addresses: AddressRange) -> Tensor:
        array = (ctypes.c_char * addresses.size).from_address(addresses.address)
        array.addresses = addresses  # alive as long as the tensor
        return torch.frombuffer(array, dtype=torch.uint8)
