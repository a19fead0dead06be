"""Which adapters (LoRA) an engine has, and in which slot of its memory each one is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from draftloop.config.engine import EngineConfig
from draftloop.errors import ConfigError, RequestError, nearest
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder
from draftloop.models.lora import check_lora, load_adapter, make_room
from draftloop.request import LoRARequest
from draftloop.scheduler.batch import Adapter

logger = logging.getLogger(__name__)


def check_adapters(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for adapters that are asked for and cannot be served, before any weights are read."""
    if config.enable_lora:
        check_lora(model, [Path(path).expanduser() for path in config.adapters.values()], max_rank=config.max_lora_rank)


class Adapters:
    """As many slots as `max_loras`; those of adapters that nobody uses are given to others."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        """Load `config.lora_modules`. Raises ConfigError for a model or adapter that cannot be served."""
        self.max_loras, self.max_rank = config.max_loras, config.max_lora_rank
        self._device = model.embed_tokens.device
        self._places = make_room(model, num_adapters=self.max_loras, rank=self.max_rank)
        self._loaded: dict[str, tuple[Adapter, str]] = {}
        """By name, with the folder; who was used least recently is the first."""
        self._paths = config.adapters
        self._numbers = itertools.count(1)
        for name, path in self._paths.items():
            self._load(name, path, slot=len(self._loaded) + 1)

    def find(self, asked: LoRARequest | str, in_use: Callable[[], Collection[Adapter | None]]) -> Adapter:
        """The adapter of a request, which is loaded where it is not there yet, in the place of one that is not in use.

        Raises RequestError for an unknown name, and an adapter that cannot be loaded or has no place.
        """
        request = LoRARequest(asked) if isinstance(asked, str) else asked
        name, path = request.lora_name, request.lora_path or self._paths.get(request.lora_name)
        if path is None:
            raise RequestError(
                f"lora_request names {name!r}{nearest(name, self._paths)} This engine's adapters: "
                f"{', '.join(self._paths) or 'none'}; give a LoRARequest with a path for another"
            )
        if name in self._loaded:
            adapter, folder = self._loaded.pop(name)
            self._loaded[name] = adapter, folder
            if folder == path:
                return adapter
            raise RequestError(f"lora_request names {name!r} at {path}, but that is loaded from {folder}; rename one")
        slot = self._free_slot(in_use)
        try:
            return self._load(name, path, slot=slot)
        except ConfigError as error:
            raise RequestError(f"lora_request names {name!r}, which cannot be loaded: {error}") from error

    def _free_slot(self, in_use: Callable[[], Collection[Adapter | None]]) -> int:
        taken = {adapter.slot for adapter, _ in self._loaded.values()}
        if free := [slot for slot in range(1, self.max_loras + 1) if slot not in taken]:
            return free[0]
        used = in_use()
        for name, (adapter, _) in self._loaded.items():
            if adapter not in used:
                del self._loaded[name]
                return adapter.slot
        raise RequestError(
            f"lora_request asks for one adapter more than max_loras, {self.max_loras}, which are all in use; wait for "
            "their requests to end, or raise max_loras (--max-loras)"
        )

    def _load(self, name: str, path: str, *, slot: int) -> Adapter:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a step in flight may read the slot for whoever had it
        load_adapter(Path(path).expanduser(), self._places, slot, max_rank=self.max_rank)
        adapter = Adapter(name=name, slot=slot, number=next(self._numbers))
        self._loaded[name] = adapter, path
        logger.info("adapter %s: %s", name, path)
        return adapter
