"""`pytest --messages`: which errors and warnings of the package no test has brought about.

The package is compiled with a note before each of them, in this process and in all that it starts. Notes go to a file
at once, since many of those processes are killed. What needs a GPU is among what is left.
"""

from __future__ import annotations

import ast
import builtins
import os
import shutil
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src/draftloop"
NOTE = "__note_message__"
LOGS = ("warning", "error", "exception")


class Messages:
    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="draftloop-tests-"))
        notes = self._folder / "notes"
        notes.touch()
        start = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport messages\nsys.path.pop()\n"
        (self._folder / "sitecustomize.py").write_text(f"{start}messages.take_notes({str(notes)!r})\n")
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        take_notes(str(notes))
        self._notes = notes

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        came = set(self._notes.read_text().split())
        sites = {place: line for path in sorted(PACKAGE.rglob("*.py")) for place, line in _sites(path).items()}
        terminalreporter.section(f"messages: {len(came & sites.keys())} of {len(sites)} came about; not these")
        for place, line in sites.items():
            if place not in came:
                terminalreporter.line(f"{place}  {line}")

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder)


def take_notes(file: str) -> None:
    """Note in a file where this process raises and warns. What has been imported says nothing."""
    sys.pycache_prefix = f"{file}-compiled"  # neither taken from what is compiled without notes, nor left to it
    known: set[str] = set()

    def note(place: str) -> None:
        if place not in known:
            known.add(place)
            with open(file, "ab", buffering=0) as notes:
                notes.write(f"{place}\n".encode())

    setattr(builtins, NOTE, note)
    compiled = SourceFileLoader.source_to_code

    def with_notes(self: SourceFileLoader, data: Any, path: Any, **more: Any) -> Any:
        if PACKAGE in Path(path).parents:
            data = ast.fix_missing_locations(_WithNotes(Path(path)).visit(ast.parse(data, path)))
        return compiled(self, data, path, **more)

    SourceFileLoader.source_to_code = with_notes  # type: ignore[method-assign]


class _WithNotes(ast.NodeTransformer):
    def __init__(self, path: Path) -> None:
        self._path = path

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        if not _is_message(node):
            return node
        call = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(_place(self._path, node))], [])
        return [ast.copy_location(ast.Expr(call), node), node]


def _is_message(node: ast.AST) -> bool:
    match node:
        case ast.Raise(exc=ast.Call()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("logger"), attr=attr))):
            return attr in LOGS
    return False


def _place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"  # type: ignore[attr-defined]


def _sites(path: Path) -> dict[str, str]:
    return {
        _place(path, node): ast.unparse(node)[:150]
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_message(node)
    }
