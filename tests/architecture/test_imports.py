"""Starting must be cheap: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys

import pytest

import draftloop

HEAVY = ("torch", "transformers", "triton", "numpy", "huggingface_hub", "tokenizers", "safetensors")


def modules_after(code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has after running `code`."""
    report = f"import sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "code",
    [
        "import draftloop; draftloop.SamplingParams, draftloop.EngineConfig, draftloop.ConfigError",
        "import draftloop.cli",
        "import draftloop.cli\ndraftloop.cli.main(['run', '--help'])",
        "import draftloop.cli\ntry: draftloop.cli.main(['run', '--block-size', '8'])\nexcept SystemExit: pass",
        "import draftloop.scheduler, pkgutil, importlib\n"
        "for m in pkgutil.iter_modules(draftloop.scheduler.__path__, 'draftloop.scheduler.'):\n"
        "    importlib.import_module(m.name)",
    ],
)
def test_no_heavy_import(code):
    assert modules_after(code) == []


def test_help_is_quick():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "draftloop", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # the processor's time, which other work on the machine does not lengthen
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took_s < 1.0


def test_exports_exist():
    assert set(draftloop.__all__) <= set(dir(draftloop))
    for name in draftloop.__all__:
        assert getattr(draftloop, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        draftloop.LMM  # noqa: B018


def test_what_rays_processes_import_compiles_no_grammar():
    """With this package, which tools for SBOMs want, jsonschema compiles one for 3 s in each of some ten processes."""
    assert importlib.util.find_spec("rfc3987_syntax") is None, "install such tools apart, as `make sbom` does"
