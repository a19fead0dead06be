"""Kernels against their torch references: in Triton's interpreter without a GPU, for real with `-m gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # must precede the first import of Triton in this process
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter patches the language before each call of a device function, although the kernel that calls
    has done so; that is a quarter of its time."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs))
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("the interpreter and the compiler exclude each other in one process; -m gpu runs these")
        from draftloop.kernels import triton_import

        assert triton_import.INTERPRETED, (
            "TRITON_INTERPRET must be set (in tests/conftest.py) before anything imports a kernel"
        )
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)
