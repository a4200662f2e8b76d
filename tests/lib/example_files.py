"""The small files on which the examples of pages run, under their names in the pages (tests/lib/examples.py)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import checkpoints
from adapters import Adapter, write_adapter
from guide import ROOT

DATA = ROOT / "tests/data"
#: Files of the project.
COPIES = {
    **{"model-bf16.gguf": "tiny-moe-bf16.gguf", "evaluation.txt": "tiny-moe-evaluation.txt"},
    **{"imatrix.gguf": "tiny-moe-imatrix.gguf", "imatrix.dat": "tiny-moe-imatrix.dat"},
}
#: Files that quantkit writes, with their commands, which run in the folder of their input files.
COMMANDS = {
    "model-Q2_K.gguf": "quantize --imatrix imatrix.gguf model-bf16.gguf model-Q2_K.gguf Q2_K",
    "model-Q4_K_M.gguf": "quantize --imatrix imatrix.gguf model-bf16.gguf model-Q4_K_M.gguf Q4_K_M",
    "model-Q8_0.gguf": "quantize model-bf16.gguf model-Q8_0.gguf Q8_0",
    "qat-Q4_0.gguf": "quantize --pure --symmetric-q40 --no-provenance model-bf16.gguf qat-Q4_0.gguf Q4_0",
    "qat-bf16.gguf": "quantize --pure --allow-requantize --no-provenance qat-Q4_0.gguf qat-bf16.gguf BF16",
    "qat-base.bin": "perplexity -m qat-bf16.gguf -f evaluation.txt --save-all-logits qat-base.bin",
    "model-00001-of-00003.gguf": "quantize --split-max-size 7M model-bf16.gguf model.gguf COPY",
    "qwen2-vl-bf16.gguf": "convert Qwen2-VL/ qwen2-vl-bf16.gguf --pre qwen2",
    "mmproj-F16.gguf": "convert Qwen2-VL/ mmproj-F16.gguf f16 --mmproj-only",
    "base.bin": "perplexity -m model-bf16.gguf -f evaluation.txt --save-all-logits base.bin",
    "cov.gguf": "imatrix -m model-bf16.gguf -f calibration.txt --chunks 8 -o i.gguf --covariance cov.gguf --no-ppl",
    "S.json": "sensitivity -m model-bf16.gguf -f evaluation.txt --chunks 2 --imatrix imatrix.gguf"
    " --types IQ2_XS,IQ3_S,Q4_K,Q6_K -o S.json",
}


def write_checkpoint(path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts/make_tiny_checkpoint.py", path], check=True)


def write_vision_checkpoint(path: Path) -> None:
    checkpoint = checkpoints.write_checkpoint("mm-qwen2-vl", path.parent)
    checkpoint.rename(path)


def write_named(name: str) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint of the tests."""

    def write(path: Path) -> None:
        checkpoints.write_description(replace(checkpoints.describe(name), name=path.name), path.parent)

    return write


def write_draft(path: Path) -> None:
    """Write a DFlash draft of one layer for the checkpoint of the examples."""
    description = checkpoints.describe("dflash")
    config = description.config | {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 4096}
    config["dflash_config"] = {"mask_token_id": 4095, "target_layer_ids": [0, 2]}
    tensors = {"fc.weight": [256, 512], "hidden_norm.weight": [256], "norm.weight": [256]}
    for name, (rows, columns) in {"q": (64, 256), "k": (32, 256), "v": (32, 256), "o": (256, 64)}.items():
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = [rows, columns]
    for name, shape in {"gate_proj": [128, 256], "up_proj": [128, 256], "down_proj": [256, 128]}.items():
        tensors[f"layers.0.mlp.{name}.weight"] = shape
    for name, n in {"input": 256, "post_attention": 256}.items():
        tensors[f"layers.0.{name}_layernorm.weight"] = [n]
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": [16] for name in "qk"}
    draft = replace(description, name=path.name, config=config, tensors=tensors)
    checkpoints.write_description(draft, path.parent)


def write_calibration(path: Path) -> None:
    text = (DATA / "tiny-moe-calibration.txt").read_bytes()
    path.write_bytes(text[:15000].rpartition(b"\n")[0])


def write_text(path: Path) -> None:
    """Write a text from which cook takes passages for calibration, measurement and the check of a search."""
    path.write_bytes((DATA / "tiny-moe-calibration.txt").read_bytes()[:120000].rpartition(b"\n")[0])


def write_part(start: int) -> Callable[[Path], None]:
    """Return a function that writes a part of a text."""

    def write(path: Path) -> None:
        path.write_bytes((DATA / "tiny-moe-calibration.txt").read_bytes().replace(b"\0", b"")[start : start + 20000])

    return write


def write_texts(path: Path) -> None:
    """Write a directory of two texts."""
    path.mkdir()
    for name, start in (("git.md", 40000), ("python.md", 80000)):
        write_part(start)(path / name)


def write_lora(path: Path) -> None:
    shapes = {
        f"model.layers.{n}.self_attn.{p}_proj.weight": (w, 256) for n in range(4) for p, w in (("q", 256), ("v", 128))
    }
    write_adapter(Adapter(path.name, "Qwen3-30B-A3B", r"self_attn\.[qv]_proj", shapes=shapes), path.parent)


WRITERS: dict[str, Callable[[Path], None]] = {
    "calibration.txt": write_calibration,
    "text.txt": write_text,
    "texts/": write_texts,
    "prose.txt": write_part(40000),
    "code.txt": write_part(80000),
    "my-adapter/": write_lora,
    "Qwen3-30B-A3B/": write_checkpoint,
    "Qwen2-VL/": write_vision_checkpoint,
    "Qwen3-30B-A3B-DFlash/": write_draft,
    "Qwen3.5/": write_named("mm-qwen3.5"),
    "nimble/": write_named("nimble"),
}
#: Folders of the clone, as links.
LINKS = {"docs/", "scripts/", "tests/"}
NAMES = LINKS | COPIES.keys() | COMMANDS.keys() | WRITERS.keys()


class ExampleFiles:
    """Files of examples, each written once, in their own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def provide(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name in LINKS:
                (folder / name.removesuffix("/")).symlink_to(ROOT / name)
                continue
            with self._lock:
                source = self._path(name)
            pattern = source.name.replace("00001-of", "*-of")
            for path in source.parent.glob(pattern):
                if path.is_dir():
                    shutil.copytree(path, folder / path.name)
                else:
                    shutil.copyfile(path, folder / path.name)

    def _path(self, name: str) -> Path:
        path = self.folder / name.removesuffix("/")
        if path.exists():
            return path
        if name in COPIES:
            shutil.copyfile(DATA / COPIES[name], path)
        elif name in WRITERS:
            WRITERS[name](path)
        else:
            words = shlex.split(COMMANDS[name])
            for word in NAMES & set(words) - {name}:
                self._path(word)
            process = subprocess.run(
                [sys.executable, "-m", "quantkit", *words],
                cwd=self.folder,
                env=os.environ,
                capture_output=True,
                text=True,
                check=False,
            )
            assert process.returncode == 0, process.stderr
        return path
