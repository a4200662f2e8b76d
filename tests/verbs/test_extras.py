"""Optional packages: all that are missing are named before any work, with one line of pip."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from commands import leaves
from quantkit import extras
from quantkit.checkpoint.requirements import checkpoint_extras
from quantkit.cli import cli
from quantkit.cli._options import is_compatible_only
from quantkit.cook import config_from, plan_cook
from quantkit.extras import MODEL_CARD, PLOT, PRE_TOKENIZER, REPORT, SEARCH, Extra, MissingPackages, check_extras

EXTRAS = [value for value in vars(extras).values() if isinstance(value, Extra)]
DECLARED = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: Extra) -> None:
    for extra in hidden:
        for module in extra.packages:
            monkeypatch.setitem(sys.modules, module, None)


def asked_for(error: MissingPackages) -> set[str]:
    """Return the extras in an error's line of pip."""
    names = re.search(r"pip install 'gguf-quantkit\[([\w,]+)\]'", error.message)
    assert names is not None
    return set(names[1].split(","))


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: f"{extra.name}-{extra.purpose}")
def test_pyproject_has_the_packages_of_extras(extra: Extra) -> None:
    packages = {re.split(r"[><=]", requirement)[0] for requirement in DECLARED["optional-dependencies"][extra.name]}
    assert set(extra.packages.values()) <= packages
    (everything,) = DECLARED["optional-dependencies"]["all"]
    assert (extra.name in re.findall(r"\w+", everything)) == (extra in extras.ALL)
    assert (extra in extras.ALL) != (extra in extras.ON_REQUEST)


def test_all_missing_packages_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, SEARCH, REPORT)
    with pytest.raises(MissingPackages) as caught:
        check_extras(SEARCH, REPORT, PLOT)
    assert caught.value.extras == (SEARCH, REPORT)
    assert asked_for(caught.value) == {"search", "report"}


def test_a_cook_names_all_missing_packages_of_its_steps(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 99)
    settings = {"targets": ["3.5bpw"], "output": str(tmp_path / "out"), "calibration": {"text": [str(text)]}}
    hide(monkeypatch, SEARCH, REPORT)
    with pytest.raises(MissingPackages) as caught:
        plan_cook(config_from({"model": str(data / "tiny-moe-bf16.gguf"), **settings}, "test", tmp_path))
    assert asked_for(caught.value) == {"search", "report"}
    assert not (tmp_path / "out").exists()


def test_a_cook_names_missing_packages_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = extras.missing_packages(MODEL_CARD)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(import_module("quantkit.cook.source"), "plan_convert", refuse)
    hide(monkeypatch, REPORT)
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 99)
    settings = {"targets": ["Q4_K_M"], "output": str(tmp_path / "out"), "calibration": {"text": [str(text)]}}
    with pytest.raises(MissingPackages) as caught:
        plan_cook(config_from({"model": str(tmp_path), **settings}, "test", tmp_path))
    assert asked_for(caught.value) == {"convert", "report"}


#: Command lines, and what pip is asked for where nothing optional is installed.
LINES = {
    "quantize s3://b/m.gguf out.gguf Q4_K --feedback i.gguf --plot x.svg --ray local": "plot ray remote s3fs",
    "quantize m.gguf out.gguf Q4_K --backend cuda --imatrix hf://o/r/i.gguf": "cuda12 remote huggingface_hub",
    "convert folder out.gguf --ray local": "convert ray",
    "convert folder out.gguf Q4_K --backend cuda --feedback i.gguf --plot x.svg": "convert cuda12 plot",
    "convert --remote org/name out.gguf --ray local": "ray remote huggingface_hub",
    "convert-lora adapter s3://b/out.gguf --base folder --ray local": "ray remote s3fs",
    "export m.gguf checkpoint --ray local": "ray",
    "merge-up-gate s3://b/m.gguf gs://b/out.gguf --ray local": "ray remote s3fs gcsfs",
    "split s3://b/m.gguf --max-size 1G --ray local": "ray remote s3fs",
    "join m-00001-of-00002.gguf --ray local": "ray",
    "prune-experts s3://b/m.gguf out.gguf --experts e.json --ray local": "ray remote s3fs",
    "stitch m.gguf out.gguf --take attn=i.gguf --ray local": "ray",
    "fit s3://b/m.gguf --draft hf://o/r/d.gguf": "remote s3fs huggingface_hub",
    "try -hf org/name --chat --backend cuda": "cuda12 remote run huggingface_hub",
    "split-up-gate https://h/m.gguf out.gguf --ray local": "ray remote",
    "inspect s3://b/m.gguf": "remote s3fs",
    "compare s3://b/a.gguf hf://o/r/b.gguf": "remote s3fs huggingface_hub",
    "perplexity -m m.gguf -f t.txt --ray local --save-all-logits b --logits-format compact --codec zstd": "ray run",
    "perplexity -hf org/name -f t.txt --backend cuda": "cuda12 remote huggingface_hub",
    "score -hf org/name -f t.txt --backend cuda": "cuda12 remote huggingface_hub",
    "drift -m m.gguf --base m.gguf -f t.txt --backend cuda": "cuda12",
    "kld -m m.gguf --base t.txt --ray local": "ray",
    "kld -hf org/name --base t.txt --backend cuda": "cuda12 remote huggingface_hub",
    "kld m.gguf --base-model m.gguf --chat t.txt --ray local": "ray run",
    "perplexity -m m.gguf --chat t.txt --ray local": "ray run",
    "logits -hf org/name -p one --backend cuda -o out.npy": "cuda12 remote huggingface_hub",
    "imatrix -m m.gguf --chat t.txt --layer-similarity --plot x.svg --ray local": "plot ray run",
    "imatrix -hf org/name --chat t.txt --backend cuda": "cuda12 remote run huggingface_hub",
    "imatrix show i.gguf --plot x.svg": "plot",
    "imatrix show s3://b/i.gguf --plot x.svg": "plot remote s3fs",
    "imatrix convert s3://b/i.gguf out.dat": "remote s3fs",
    "sensitivity -hf org/name -f t.txt -o out.json": "remote huggingface_hub",
    "search -s s.json --target-bpw 4": "search",
    "search -s s.json --front front.csv --plot x.svg": "plot search",
    "bench -hf org/name --backend cuda": "cuda12 remote huggingface_hub",
    "sweep-bench -hf org/name --backend cuda": "cuda12 remote huggingface_hub",
    "report out.html m.gguf --backend cuda": "cuda12 report",
    "upload org/name m.gguf": "hub",
    "types --plot x.svg": "plot",
    "cook m.gguf 3.5bpw --chat t.txt -f t.txt -o out": "report run search",
}
#: Options that need an extra.
OPTIONS = {"--plot", "--chat", "--ray", "--backend", "--hf-repo", "--codec", "--remote"}


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_all_that_it_lacks(
    line: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, *EXTRAS, *(extra for scheme in extras.STORE_PACKAGES for extra in extras.store_extras(scheme)))
    (tmp_path / "m.gguf").symlink_to(data / "tiny-moe-bf16.gguf")
    (tmp_path / "i.gguf").symlink_to(data / "tiny-moe-imatrix.gguf")
    (tmp_path / "t.txt").write_text("a text\n" * 99)
    (tmp_path / "s.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("---\nlicense: mit\n---\n")
    before = set(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 1, result.output
    assert "[QK-E410]" in result.output
    install = result.output.partition("pip install ")[2].partition(";")[0].partition(" [QK-")[0]
    assert sorted(re.findall(r"[\w]+", install.replace("gguf-quantkit", ""))) == sorted(LINES[line].split())
    assert set(tmp_path.rglob("*")) == before


def test_every_option_that_needs_an_extra_is_tried() -> None:
    declared, tried = set(), set()
    for path, command in leaves((), cli):
        names = {n: p for p in command.params for n in p.opts if n in OPTIONS and not is_compatible_only(p)}
        declared |= {(path, name) for name in names}
        lines = [line.split() for line in LINES if tuple(line.split()[: len(path)]) == path]
        tried |= {(path, n) for n, p in names.items() for line in lines if set(p.opts) & set(line)}
    assert declared == tried
    assert len(declared) > 20


@pytest.mark.parametrize(
    ("card", "model", "has_pre", "expected"),
    [
        ("---\nlicense: mit\n---\n", {"type": "BPE"}, False, (MODEL_CARD, PRE_TOKENIZER)),
        ("# a model\n", {"type": "BPE"}, True, ()),
        ("", {"type": "Unigram"}, False, ()),
        ("---\n", None, False, (MODEL_CARD,)),
    ],
)
def test_a_checkpoint_needs_what_its_files_need(
    tmp_path: Path, card: str, model: object, has_pre: bool, expected: tuple[Extra, ...]
) -> None:
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert checkpoint_extras(tmp_path, has_pre=has_pre) == expected


def test_a_damaged_checkpoint_is_left_to_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert checkpoint_extras(tmp_path) == ()


@pytest.mark.parametrize("command", [[], ["recipe"], ["cache"]], ids=lambda command: "-".join(["quantkit", *command]))
def test_help_texts_keep_their_lines(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantkit.cli import main

    monkeypatch.setattr(sys, "argv", ["quantkit", *command])
    with pytest.raises(SystemExit) as exit_info:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert lines[0].startswith("Usage: quantkit")
    assert len(lines) > 8
    assert "\\n" not in "".join(lines)
