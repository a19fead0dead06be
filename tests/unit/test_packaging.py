"""What is installed from a wheel and an sdist."""

import json
import os
import re
import shutil
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
from draftloop.config.env import Environment

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


NEEDED = (
    "draftloop/py.typed",
    "draftloop/server/page/index.html",
    "draftloop/graphs/loop.cu",
    "draftloop/kernels/cuda/streamed_pass.cu",
    "draftloop/kernels/cuda/attention.cuh",
    "draftloop/kernels/native/kernels.c",
    "draftloop/kernels/native/vectors.h",
    "draftloop/bench/prompts/mt_bench.jsonl",
    "draftloop/shipped/smollm2-135m-eagle3/model.safetensors",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A wheel, of what the image's build gets to see, and an sdist of this checkout."""
    out, context = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("context")
    for name in in_the_image():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context)
    for kind, folder in (("wheel", context), ("sdist", ROOT)):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
        subprocess.run(command, cwd=folder, check=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def in_the_image() -> list[str]:
    """What `COPY .` of the Dockerfile copies."""
    first, *lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*"
    return [line[1:] for line in lines if line.startswith("!")]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, in order, without comments and with lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


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


def test_the_image_runs_as_a_user_of_its_own_who_owns_the_caches_in_the_volume():
    found = instructions()
    last = found[max(index for index, (word, _) in enumerate(found) if word == "FROM") :]
    words, said = [word for word, _ in last], dict(last)
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert words.index("RUN") < words.index("USER")
    assert f"--owner={said['USER']} {said['VOLUME']}" in said["RUN"], "a volume gets its folder's owner"
    assert words.index("RUN") < words.index("VOLUME"), "what is changed behind it is lost"
    variables = dict(entry.split("=", 1) for entry in said["ENV"].split())
    caches = {"HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    assert caches <= {name for name, value in variables.items() if Path(value).is_relative_to(said["VOLUME"])}
    assert Environment.read(variables).cache_root.is_relative_to(said["VOLUME"])


def test_the_image_serves_and_asks_itself_whether_it_does():
    said = dict(instructions())
    command = json.loads(said["ENTRYPOINT"]) + json.loads(said["CMD"])
    assert command[0] in project()["scripts"]
    cli.app.parse_args(command[1:], exit_on_error=False, print_error=False)
    port = command[command.index("--port") + 1]
    assert said["EXPOSE"] == port
    check = said["HEALTHCHECK"].partition("CMD ")[2]
    assert f"http://127.0.0.1:{port}/health" in check
    compile(json.loads(check)[-1], "health check", "exec")


def test_the_image_keeps_nothing_of_what_only_installing_takes():
    runs = [rest for word, rest in instructions() if word == "RUN"]
    assert all("--no-cache-dir" in run for run in runs if "pip install" in run)
    for run in runs:
        if "apt-get install" in run:
            assert run.startswith("apt-get update && ")
            assert "--no-install-recommends" in run
            assert run.endswith("rm -rf /var/lib/apt/lists/*")
    copied = [rest.split() for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert copied == [[".", "/src"]]
    assert all((ROOT / name).exists() for name in in_the_image())


def test_one_version_stands_everywhere():
    assert project()["version"] == draftloop.__version__
    assert f"version: {draftloop.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    extras = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("ARG EXTRAS="))
    assert set(extras.partition("=")[2].split(",")) <= set(project()["optional-dependencies"])
