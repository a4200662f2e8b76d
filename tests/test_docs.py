"""What comments, docstrings and the Markdown files name is there: files of this project."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.kernels.cuda.core.generated import headers
from site_sources import PAGES, ROOT, generated_pages

FOLDERS = ("quantkit", "tests", "scripts", "benchmarks")
KINDS = ("py", "cu", "cuh", "npz", "md", "toml")
#: Matches the name of a file, with or without folders: a whole one, without wildcards or <parts> to fill in.
FILE_NAME = re.compile(rf"(?<![\w*<>{{}}./-])((?:[\w-]+/)*[\w-]+\.(?:{'|'.join(KINDS)}))(?![\w*({{-])")
#: Files of others, or of users.
EXTERNAL = {
    "cooked/README.md",
    "constants.py",
    "convert_hf_to_gguf.py",
    "convert_hf_to_gguf_update.py",
    "convert_lora_to_gguf.py",
    "gguf_convert_endian.py",
    "SmolLM2-cooked/README.md",
    "gguf_new_metadata.py",
    "gguf_set_metadata.py",
    "gpu_check.md",
    "OUT/gpu_check.md",
    "OUT.npz",
    "out.md",
    "cook.toml",
    "pipe.toml",
}
#: Of llama.cpp's converter, and what checkpoints have.
EXTERNAL |= {f"gguf-py/gguf/{name}.py" for name in ("constants", "metadata")} | {"README.md"}
EXTERNAL |= {"gguf_writer.py", "quants.py", "tensor_mapping.py", "exaone.py", "stablelm.py", "starcoder.py"}
#: Of transformers, PEFT, AutoAWQ, and repositories of models.
EXTERNAL |= {"tuners/lora/config.py", "tuners/lora/model.py", "tuners/lora/layer.py", "tuners/lora/variants.py"}
EXTERNAL |= {"utils/other.py", "utils/save_and_load.py"}
EXTERNAL |= {
    "convert_slow_tokenizer.py",
    "utils/packing_utils.py",
    "tokenization_hy.py",
    "tokenization_kimi.py",
    "tokenization_qwen.py",
}

FILES = {p.relative_to(ROOT).as_posix() for kind in KINDS for p in ROOT.rglob(f"*.{kind}") if ".venv" not in p.parts}
FILES |= headers().keys()  # made when a module is compiled
FILES |= generated_pages().keys()  # made when the site is built
#: The same, and what remains of them without the first folders.
SUFFIXES = {name[start:] for name in FILES for start in (0, *(i + 1 for i, letter in enumerate(name) if letter == "/"))}
SOURCES = sorted(p for f in FOLDERS for kind in ("py", "cu", "cuh") for p in (ROOT / f).rglob(f"*.{kind}"))


def prose(path: Path) -> Iterator[str]:
    """Yield the comments and docstrings of a source, if it names anything that is missing."""
    text = path.read_text(encoding="utf-8")
    if not missing(text):
        return
    if path.suffix != ".py":
        yield from re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)
        return
    before = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        statement = before in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and statement):
            yield token.string
        before = token.type


def missing(text: str) -> set[str]:
    names = {name for name in FILE_NAME.findall(text) if not name.startswith("conversion/")} - EXTERNAL
    return names - SUFFIXES


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_named_in_docstrings_exist(folder: str) -> None:
    wrong = {p: missing("\n".join(prose(p))) for p in SOURCES if p.is_relative_to(ROOT / folder)}
    assert not {p.relative_to(ROOT).as_posix(): names for p, names in wrong.items() if names}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_pages_exist(page: Path) -> None:
    assert not missing(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_functions_named_in_pages_exist(page: Path) -> None:
    """Named behind their file."""
    for name, function in re.findall(r"`([\w/]+\.py): (\w+)`", page.read_text(encoding="utf-8")):
        sources = [p.read_text(encoding="utf-8") for p in SOURCES if p.as_posix().endswith(f"/{name}")]
        defined = rf"^(?:def |class ){function}\b|^{function}\b.* = "
        assert any(re.search(defined, text, re.MULTILINE) for text in sources), f"{name}: {function}"


def test_a_missing_file_is_detected() -> None:
    assert missing("see kernels/cpu/core/jit.py, attention.cuh and no_such.py, x*.py, {name}.py") == {"no_such.py"}
