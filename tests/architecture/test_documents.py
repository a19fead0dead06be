"""What documents say of files, code, commands and messages is there."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from draftloop import cli
from draftloop.models.presets import PRESETS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ERRORS = {"ConfigError", "RequestError", "CapacityError", "GraphError", "RankError", "warning"}


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(*kinds: str) -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}", code)
        for path in DOCUMENTS
        for kind, code in BLOCK.findall(path.read_text())
        if kind in kinds
    ]


def test_relative_links_lead_somewhere():
    broken = []
    for path in DOCUMENTS:
        for target in LINK.findall(BLOCK.sub("", path.read_text())):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            there = file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()))
            if not there:
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


def test_every_document_is_a_page_of_the_site():
    def pages(nav: object) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
            yield from pages(part)

    found = sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert found == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_python_blocks_compile():
    found = blocks("python")
    assert found
    for name, code in found:
        compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


def commands() -> list[str]:
    """Lines that call draftloop, in blocks of shell, without comments, pipes and what continues them."""
    found = set()
    for _, code in blocks("bash", "sh", ""):
        lines = iter(code.replace("\\\n", " ").splitlines())
        for line in lines:
            if not re.match(r"\s*(?:\w+=\S+ )*draftloop ", line):
                continue
            while line.count("'") % 2:  # JSON over several lines
                line += " " + next(lines).strip()
            found.add(re.split(r"(?:^|\s)draftloop |\s+[|&;>]+ ?", line)[1].strip())
    return sorted(found)


@pytest.mark.parametrize("line", commands())
def test_commands_are_what_the_program_takes(line):
    words = [word for word in shlex.split(line, comments=True) if word not in ("..", "...")]
    words = ["1" if re.fullmatch(r"[A-Z]", word) else word for word in words]  # a number's stand-in
    cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert "dummy" in words or not PRESETS.keys() & set(words), "a shape without weights"


def test_parts_of_the_gpu_script_that_are_mentioned_exist():
    script = (ROOT / "tools/gpu.sh").read_text()
    for path in DOCUMENTS:
        for part in re.findall(r"tools/gpu\.sh OUT ([a-z_]+)", path.read_text()):
            assert re.search(rf"^{part}\(\) {{", script, re.MULTILINE), f"{path.name}: {part}"


def messages() -> list[str]:
    """What the package says where it refuses or warns; {} stands for what is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        return str(node.value) if isinstance(node, ast.Constant) else "{}"

    found = []
    for path in (ROOT / "src/draftloop").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ERRORS:
                    found += [text(argument) for argument in node.args]
            elif isinstance(node, ast.IfExp):
                found.append(text(node.body))
            elif isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.JoinedStr | ast.Constant):
                found.append(text(node.value))  # put together before it is raised
    return found


def test_messages_in_troubleshooting_are_those_of_the_source():
    said = messages()
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    phrases = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row) if phrase not in ERRORS]
    assert len(phrases) > 50
    unknown = []
    for phrase in phrases:
        parts = [part.strip() for part in phrase.split("..") if part.strip()]
        if not any(all(part in message for part in parts) for message in said):
            unknown.append(phrase)
    assert not unknown


def test_the_map_has_every_folder_in_the_order_in_which_imports_go():
    section = (ROOT / "docs/architecture.md").read_text().split("## Folders")[1].split("## ")[0]
    layers = [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert layers == [re.findall(r"\w+", layer) for layer in contract["layers"]]
    package = ROOT / "src/draftloop"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders <= {name for layer in layers for name in layer}


def test_files_and_names_that_are_mentioned_exist():
    package = ROOT / "src/draftloop"
    source = "\n".join(path.read_text() for path in (*package.rglob("*.py"), *package.rglob("*.cu")))
    known = {
        path.name for folder in ("src", "tests", "tools", "examples", "docs") for path in (ROOT / folder).rglob("*.*")
    }
    missing = []
    for path in DOCUMENTS:
        for name in re.findall(r"`([^`\n]+)`", BLOCK.sub("", path.read_text())):
            if re.fullmatch(r"[\w./*-]+\.(?:py|cu|ts|sh|md)", name):  # relative to the package or to the repository
                there = name in known or any(any(base.glob(name)) for base in (package, ROOT, path.parent))
            elif found := re.fullmatch(r"([A-Z]\w+)\.(_?[a-z]\w+)(?:\(.*\))?", name):  # Class.method
                there = all(re.search(rf"\b{part}\b", source) for part in found.groups())
            else:
                continue
            if not there:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing
