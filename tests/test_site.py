"""Pages of docs/ are whole: each has every code, key and variable of the source, and links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import quantkit
from quantkit.calibration.heldout import HELD_OUT_KEYS
from quantkit.calibration.overlap import SKETCH_KEYS
from quantkit.cli import COMMANDS, cli
from quantkit.convert import architectures, encoder_classes
from quantkit.errors import WARNINGS
from quantkit.model.arch import ARCHS
from quantkit.pipeline.presets import PRESETS
from quantkit.types import TYPES
from site_sources import DOCS, PAGES, ROOT, generated_pages

SOURCES = sorted((ROOT / "quantkit").rglob("*.py"))


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield every string of a module, with {} for the values of f-strings; docstrings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    """The syntax tree of every module, by path."""
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in SOURCES}


def test_every_warning_is_in_the_table(trees: dict[str, ast.AST]) -> None:
    """And those of the table are in the source."""
    sources = [tree for name, tree in trees.items() if name != "quantkit/errors.py"]
    used = {code for tree in sources for value in strings(tree) for code in re.findall(r"QK-W\d{3}", value)}
    assert used == WARNINGS.keys()


def environment_variables(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module looks up in os.environ, or gives click as ``envvar``."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("os.environ.get", "os.environ.setdefault", "os.environ.pop", "os.getenv", "environ.get", "getenv"),
        ):
            names.append(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
            names.append(node.slice)
        elif isinstance(node, ast.keyword) and node.arg == "envvar":
            names.append(node.value)
        for name in names:
            if isinstance(name, ast.Constant):
                yield str(name.value)
            elif isinstance(name, ast.Name) and name.id in constants:
                yield str(constants[name.id])


def test_environment_variables_have_an_entry(trees: dict[str, ast.AST]) -> None:
    read = {name for tree in trees.values() for name in environment_variables(tree)}
    read |= {
        name
        for tree in trees.values()
        for value in strings(tree)
        for name in re.findall(r"\bQUANTKIT_[A-Z_]+\b", value)
    }
    assert len(read) >= 6
    assert read >= {"QUANTKIT_CACHE", "QUANTKIT_TENSOR_CACHE", "COLUMNS"}
    section = text("reference/environment.md").split("## Read by libraries")[0]
    assert read == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) - {"_QUANTKIT_COMPLETE"}


KEY = re.compile(
    r"(?:quantkit\.(?:quantize|copy|source|feedback|calibration|imatrix|covariance|merge|prune|stitch)|imatrix|split|quantize\.imatrix)"
    r"\.[\w.]+|quantkit\.pad"
)
#: Strings of the source that look like keys: names of files, and the part of a key behind quantkit.quantize.
NO_KEYS = {"imatrix.gguf", "imatrix.txt", "imatrix.sha256"}


def test_keys_have_an_entry(trees: dict[str, ast.AST]) -> None:
    """Those that are whole strings of the source, and those that a plan and a calibration compose."""
    keys = {value for tree in trees.values() for value in strings(tree) if KEY.fullmatch(value)} - NO_KEYS
    keys |= {*SKETCH_KEYS, *HELD_OUT_KEYS}
    facts = returned_keys(trees["quantkit/quantize/metadata.py"], "_facts")
    extra = returned_keys(trees["quantkit/quantize/metadata.py"], "_record_quantization")
    feedback = returned_keys(trees["quantkit/pipeline/feedback.py"], "fields")
    feedback |= returned_keys(trees["quantkit/sequential/calibrate.py"], "fields")
    keys |= {f"quantkit.quantize.{name}" for name in facts | extra} | {f"quantkit.copy.{name}" for name in facts}
    keys |= {f"quantkit.feedback.{name}" for name in feedback}
    documented = set(re.findall(r"`((?:quantkit|imatrix|quantize|split)\.[\w.]*\w)`", text("reference/keys.md")))
    assert not {key for key in keys - documented if not is_module(key)}
    moved = {"quantkit.source.quantize.recipe", "quantkit.source.source.quantize.recipe"}
    assert documented - keys == moved


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module of quantkit, or a member of one of its packages."""
    path = ROOT / "quantkit" / name.removeprefix("quantkit.").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def returned_keys(tree: ast.AST, function: str) -> set[str]:
    """Return the keys of all dicts in the functions of this name."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    assert functions, function
    nodes = [node for f in functions for node in ast.walk(f) if isinstance(node, ast.Dict | ast.Assign)]
    keys = {k.value for n in nodes if isinstance(n, ast.Dict) for k in n.keys if isinstance(k, ast.Constant)}
    targets = [t for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Subscript)]
    return {str(key) for key in keys} | {t.slice.value for t in targets if isinstance(t.slice, ast.Constant)}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the path within the repository and the anchor of every relative link of a page; not in code blocks."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    folder = page.parent.relative_to(ROOT).as_posix()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            yield (
                posixpath.normpath(posixpath.join(folder, path)) if path else page.relative_to(ROOT).as_posix(),
                anchor,
            )


def headings(path: str) -> set[str]:
    """Return the anchors of a page, of a file or generated."""
    page = generated_pages().get(path) or (ROOT / path).read_text(encoding="utf-8")
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and Python-Markdown make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_have_targets(page: Path) -> None:
    targets = set(links(page))
    assert not {path for path, _ in targets if path not in generated_pages() and not (ROOT / path).exists()}
    anchors = {(path, anchor) for path, anchor in targets if anchor and path.endswith(".md")}
    assert not {(path, anchor) for path, anchor in anchors if anchor not in headings(path)}


def test_every_command_has_a_page_with_its_options() -> None:
    for name in COMMANDS:
        page = generated_pages()[f"docs/reference/commands/{name}.md"]
        for command in commands(name):
            visible = [o for o in command.params if isinstance(o, click.Option) and not o.hidden]
            missing = [o.opts[-1] for o in visible if o.opts[-1] not in page]
            assert not missing, (name, missing)


def commands(name: str) -> Iterator[click.Command]:
    """Yield a command, and those of its group."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    yield command
    if isinstance(command, click.Group):
        yield from command.commands.values()


def test_every_type_and_preset_has_a_row() -> None:
    types, presets = generated_pages()["docs/reference/types.md"], generated_pages()["docs/reference/presets.md"]
    assert [t.name for t in TYPES if f"| `{t}` | {t.id} |" not in types] == []
    assert [p.name for p in PRESETS if f"| `{p}` | {p.ftype} |" not in presets] == []


def test_every_public_name_is_in_the_api() -> None:
    page = generated_pages()["docs/reference/api.md"]
    members = {name: getattr(quantkit, name) for name in quantkit.__all__}
    paths = {n: f"::: {m.__module__}.{m.__qualname__}\n" for n, m in members.items() if hasattr(m, "__qualname__")}
    for name, module in members.items():
        if inspect.ismodule(module):
            public = {n: getattr(module, n) for n in module.__all__}
            paths |= {
                f"{name}.{n}": f"::: {m.__module__}.{m.__qualname__}\n"
                for n, m in public.items()
                if inspect.isfunction(m) or inspect.isclass(m)
            }
    assert {"quantize", "kernels.quantize", "errors.FormatError"} <= paths.keys()
    assert [name for name, path in paths.items() if path not in page] == []


def test_every_model_has_a_row() -> None:
    page = generated_pages()["docs/reference/models.md"]
    assert [name for name in architectures() if f"`{name.rpartition('.')[2]}`" not in page] == []
    assert [name for name in ARCHS if f"| `{name}` | yes |" not in page] == []
    rows = [f"| `{name}` | {', '.join(f'`{p}`' for p in types)} |" for name, types in encoder_classes().items()]
    assert [row for row in rows if row not in page] == []
