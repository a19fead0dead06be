"""What is installed from a wheel and an sdist."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import draftloop
from draftloop import cli

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


NEEDED = (
    "draftloop/py.typed",
    "draftloop/server/page/index.html",
    "draftloop/graphs/loop.cu",
    "draftloop/kernels/cuda/streamed_pass.cu",
    "draftloop/kernels/cuda/wide_pass.cu",
    "draftloop/kernels/cuda/attention.cuh",
    "draftloop/bench/prompts/mt_bench.jsonl",
    "draftloop/shipped/smollm2-135m-eagle3/model.safetensors",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A wheel and an sdist of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_an_installed_wheel_imports_without_a_gpu_and_answers(built, tmp_path):
    wheel, _ = built
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv/bin/python")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    # what draftloop needs is taken from here, so that nothing is downloaded; a path line brings no editable installs
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["CUDA_VISIBLE_DEVICES"] = ""

    def said(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True).stdout

    where = said(python, "-c", "import draftloop; draftloop.EngineConfig(); print(draftloop.__file__)")
    assert where.startswith(str(site))
    assert "check-drafter" in said(str(tmp_path / "venv/bin/draftloop"), "--help")
    refused = subprocess.run(
        [str(tmp_path / "venv/bin/draftloop"), "run", "--max-num-seqs", "0"],
        cwd=tmp_path, env=clean, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "max_num_seqs is 0" in refused.stderr


def test_wheel_and_sdist_hold_what_runs_and_its_licences(built):
    wheel, sdist = built
    files = set(zipfile.ZipFile(wheel).namelist())
    assert set(NEEDED) <= files
    licences = {name.rpartition("/licenses/")[2] for name in files if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE", "src/draftloop/bench/prompts/LICENCES.md"}
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in NEEDED} | {"pyproject.toml", "README.md", "NOTICE"} <= sources


def test_the_image_runs_as_a_user_of_its_own_and_copies_what_the_build_needs():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    words = [line.split()[0] for line in last if line and line[0] != " "]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert {"VOLUME", "HEALTHCHECK"} <= set(words)
    instructions = dict(
        line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if "[" in line
    )
    command = json.loads(instructions["ENTRYPOINT"]) + json.loads(instructions["CMD"])
    assert command[0] in project()["scripts"]
    cli.app.parse_args(command[1:], exit_on_error=False, print_error=False)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "src"}


def test_one_version_stands_everywhere():
    assert project()["version"] == draftloop.__version__
    assert f"version: {draftloop.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    extras = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("ARG EXTRAS="))
    assert set(extras.partition("=")[2].split(",")) <= set(project()["optional-dependencies"])
