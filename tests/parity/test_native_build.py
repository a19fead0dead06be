"""Compiling the C kernels: once, by whoever comes first; and nothing but speed is lost without a compiler."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from draftloop.kernels.linear import linear
from draftloop.kernels.native import build, functions, ops
from draftloop.kernels.native.build import BuildError, find_compiler, library, load

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler (cc, gcc or clang)"
)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels as in a process that has not asked for them, with an empty cache."""
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(functions.c, "__dict__", {})
    monkeypatch.delenv("CC", raising=False)
    # a cache of its own, so that what later tests use is left alone
    monkeypatch.setattr(functions, "library", library.__wrapped__)
    return tmp_path / "native"


def fallback_works() -> None:
    x, weight = torch.randn(2, 64), torch.randn(8, 64)
    assert not ops.takes_linear(x, weight, None)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


@pytest.fixture
def quick(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a compiler that does not optimise, where it is only asked for something to load."""
    compiler = fresh.parent / "quick"
    compiler.write_text(f'#!/bin/sh\nexec {find_compiler()[0]} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return fresh


@NEEDS_COMPILER
def test_the_second_process_finds_what_the_first_has_made(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert functions.available()
    (made,) = fresh.iterdir()
    modified = made.stat().st_mtime_ns

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert load(fresh) is not None
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [modified]


@NEEDS_COMPILER
def test_another_header_gets_its_own(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCE.parent, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(build, "SOURCE", sources / build.SOURCE.name)
    first = build.build(quick)
    with (sources / "vectors.h").open("a") as header:
        header.write("// changed\n")
    assert build.build(quick) != first


@NEEDS_COMPILER
def test_other_flags_or_another_machine_get_their_own(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build.build(quick).name}
    monkeypatch.setattr(build, "_cpu", lambda: "another processor")
    names.add(build.build(quick).name)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    names.add(build.build(quick).name)
    assert {path.name for path in quick.iterdir()} == names
    assert len(names) == 3


@NEEDS_COMPILER
def test_processes_that_build_at_once_all_succeed(quick: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from draftloop.kernels.native.build import load; load(Path(sys.argv[1]))"
    )
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run([sys.executable, "-c", script, str(quick)]), range(2)))
    assert [process.returncode for process in done] == [0, 0]
    assert [path.suffix for path in quick.iterdir()] == [".so"]


@NEEDS_COMPILER
def test_a_damaged_file_is_made_anew(quick: Path) -> None:
    path = build.build(quick)
    path.write_bytes(path.read_bytes()[:100])
    assert load(quick) is not None


@NEEDS_COMPILER
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc to look at")
def test_torch_and_the_kernels_share_one_pool_of_threads() -> None:
    assert functions.available()
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in maps if "/libgomp" in path or "/libomp" in path or "/libiomp" in path]) <= 1


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(BuildError, match="install gcc"):
        find_compiler()
    with caplog.at_level(logging.WARNING, "draftloop"):
        fallback_works()
    assert "there is no C compiler; install gcc" in caplog.text
    assert "slower" in caplog.text
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler -m64", "CC names, 'no-such-compiler -m64', does not exist"),
        ("false", "failed: exit status 1"),
        ("true", "FileNotFoundError"),
        ("{tmp}/broken --wrapped", "kernels.c:1: error: it is broken"),
    ],
)
def test_a_compiler_that_does_not_work(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, message: str
) -> None:
    broken = fresh.parent / "broken"
    broken.write_text("#!/bin/sh\necho 'kernels.c:1: error: it is broken' >&2\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", compiler.format(tmp=fresh.parent))
    with caplog.at_level(logging.WARNING, "draftloop"):
        fallback_works()
    assert message in caplog.text
    assert not list(fresh.glob("*")), "nothing is left lying about"


@NEEDS_COMPILER
def test_a_cache_that_cannot_be_written(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "draftloop"):
        fallback_works()
    assert "FileExistsError" in caplog.text or "NotADirectoryError" in caplog.text


def test_the_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "draftloop"):
            assert library() is None
            assert library() is None
        assert len(caplog.records) == 1
    finally:
        library.cache_clear()


@NEEDS_COMPILER
def test_the_source_gives_no_warnings(tmp_path: Path) -> None:
    command = [
        *find_compiler(),
        *build.FLAGS,
        "-Wall",
        "-Wextra",
        "-Werror",
        str(build.SOURCE),
        "-o",
        str(tmp_path / "k"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@NEEDS_COMPILER
@pytest.mark.parametrize("machine", ["x86-64", "haswell", "skylake-avx512"])
def test_the_source_compiles_for_other_vector_widths(tmp_path: Path, machine: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("not a machine whose compiler knows these")
    other = {"-march=native": f"-march={machine}", "-O3": "-O1"}
    flags = [other.get(flag, flag) for flag in build.FLAGS]
    command = [*find_compiler(), *flags, "-Wall", "-Werror", str(build.SOURCE), "-o", str(tmp_path / "k")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@NEEDS_COMPILER
def test_a_file_that_cannot_be_loaded_twice_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(folder: Path) -> Path:
        fresh.write_text("no library")
        return fresh

    monkeypatch.setattr(build, "build", damaged)
    with pytest.raises(BuildError, match="cannot be loaded: "):
        load(fresh)
