"""CUDA's driver, for what torch has no function for."""

from __future__ import annotations

from typing import Any


class DriverError(RuntimeError):
    """What the driver says of a call that failed."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.status = status
        """The driver's own name, such as CUDA_ERROR_OUT_OF_MEMORY."""


def ask(name: str, *args: Any) -> Any:
    """Call a function of the driver and return its result, if it has one.

    Raises DriverError; ImportError without cuda-bindings.
    """
    driver = bindings()
    status, *results = getattr(driver, name)(*args)
    if status:
        text = driver.cuGetErrorName(status)[1]
        raise DriverError(name, text.decode() if text else str(status))
    return results[0] if results else None


def bindings() -> Any:
    """The module `cuda.bindings.driver`, which torch's CUDA builds bring along."""
    from cuda.bindings import driver  # pyrefly: ignore[missing-import]

    return driver
