"""Threads may compile kernels side by side."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from draftloop.kernels.triton_import import apart

INCLUDE, COMPILER = Path(sysconfig.get_path("include")), shutil.which("cc")
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "a_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_a_launcher(void) { return PyModule_Create(&module); }
"""


def load(name: str, path: str) -> ModuleType:
    """As Triton does."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launchers(tmp_path):
    """Two extension modules of one name."""
    if COMPILER is None or not (INCLUDE / "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "launcher.c").write_text(SOURCE % number)
        paths.append(str(folder / "a_launcher.so"))
        options = ["-shared", "-fPIC", "-I", str(INCLUDE), "-o", paths[-1]]
        subprocess.run([COMPILER, *options, str(folder / "launcher.c")], check=True)
    yield paths
    sys.modules.pop("a_launcher", None)


def test_a_launcher_stays_its_own_when_another_thread_loads_one_again(launchers):
    first, second = launchers
    load_apart = apart(load)
    assert load_apart("a_launcher", first).launch() == 1
    mine = load_apart("a_launcher", second)
    assert load_apart("a_launcher", first).launch() == 1  # another thread, which compiled what there was already
    assert mine.launch() == 2
