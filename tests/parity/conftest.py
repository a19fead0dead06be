"""Kernels against their torch references: in Triton's interpreter without a GPU, for real with `-m gpu`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # must precede the first import of Triton in this process
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter patches the language before each call of a device function, which is a third of its time.
    Once in a launch is enough for all that see the same modules of the language. Another third is overflows of sums,
    which it works out and drops; and it makes a table of types for each that it translates."""
    if torch.cuda.is_available():
        yield
        return
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patched: set[frozenset[str]] = set()
    launch = interpreter.GridExecutor.__call__

    @functools.cache
    def modules(function: Callable) -> frozenset[str]:
        return frozenset(
            name for name, value in function.__globals__.items() if value is language or value is language.core
        )

    of_scalar = functools.cache(interpreter._get_np_dtype)

    def numpy_type(kind: Any) -> np.dtype:
        scalar = kind.element_ty if isinstance(kind, language.block_type) else kind
        return np.dtype(np.uint64) if isinstance(scalar, language.pointer_type) else of_scalar(scalar)

    def launch_anew(kernel: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        launch(kernel, *args, **options)

    def call(function: Any, *args: Any, **options: Any) -> Any:
        if (seen := modules(function.fn)) not in patched:
            patched.add(seen)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
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


@pytest.fixture
def sums_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter's products. BLAS, which it asks, may add up a row otherwise where it stands elsewhere: so it
    does on AMD's processors."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: TensorHandle, b: TensorHandle, sums: TensorHandle, *_options: Any) -> TensorHandle:
        a_MK, b_KN = (operand.data.astype(np.float32) for operand in (a, b))
        return TensorHandle(np.einsum("mk,kn->mn", a_MK, b_KN) + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
