"""What all tests share: a clean environment, few threads, and no GPU tests without a GPU."""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long examples take says what else the machine does. Those that share a fixture leave it as they found it.
settings.register_profile(
    "draftloop", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("draftloop")

# Before anything imports torch: each xdist worker would otherwise start one thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[_name] = "1"
    # Where there are several GPUs, the workers spread over them.
    _gpus = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    if _gpus > 1:
        _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(_worker % _gpus))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests start many Pythons: each would compile all sources again where the environment forbids to keep what comes of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before anything imports triton, transformers included: kernels run in its interpreter without a GPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

_OURS = "DRAFTLOOP_"
# DRAFTLOOP_POISON is left alone: the whole suite must pass with it. So is the cache, which saves downloads.
_KEPT = ("DRAFTLOOP_POISON", "DRAFTLOOP_CACHE_ROOT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-combination", action="store_true", help="run test matrices whole, not a selection")
    parser.addoption("--large-models", action="store_true", help="run what downloads hundreds of MB, for minutes")
    parser.addoption("--costs", action="store_true", help="say which files take the most processor time")
    parser.addoption("--messages", action="store_true", help="say which errors and warnings no test brings about")
    parser.addoption("--traffic-examples", type=int, default=2, help="traffic tried for each drafter (state machine)")


def pytest_configure(config: pytest.Config) -> None:
    for name in [n for n in os.environ if n.startswith(_OURS) and n not in _KEPT]:
        del os.environ[name]
    if config.getoption("--costs"):
        from costs import Costs

        config.pluginmanager.register(Costs())
    if config.getoption("--messages") and not hasattr(config, "workerinput"):  # workers have begun with it
        from messages import Messages

        config.pluginmanager.register(Messages())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _is_case(item)]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    if "gpu" in config.getoption("markexpr"):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; there is none"))
    else:  # to set up and to report a thousand that are skipped takes seconds
        gone = set(gpu_items)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gpu_items)


def _is_case(item: pytest.Item) -> bool:
    """`@pytest.mark.cases(where=...)`, asked by the names of parameters: what others show is no case, and no skip."""
    for mark in item.iter_markers("cases"):
        where = mark.kwargs["where"]
        asked = inspect.signature(where).parameters
        if not where(**{name: value for name, value in item.callspec.params.items() if name in asked}):
            return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays. Who collects garbage need not look through it, now or later, for most of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def keeps_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps quantised weights too, as a GPU does."""
    from draftloop.models import loader

    monkeypatch.setattr(loader, "keeps_quantised", lambda device: True)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command sends draftloop's log to stderr, past all that listen: not beyond the test that gave it."""
    yield
    logger = logging.getLogger("draftloop")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
