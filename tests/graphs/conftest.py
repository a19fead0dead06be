"""The same tests run on the CPU's tape and, with `-m gpu`, on captured CUDA graphs."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param
