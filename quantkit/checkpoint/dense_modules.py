"""Dense layers after the pooling of an embedding model: modules of sentence-transformers.

Facts of llama.cpp b11434, conversion/gemma.py (EmbeddingGemma). modules.json lists them; each is a folder with
config.json and model.safetensors. Files have them only by --sentence-transformers-dense-modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Stored
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.pooling import read_modules
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import read_header

#: The value of a configuration that has the layers in the file.
OPTION = "sentence_transformers_dense_modules"


def dense_folders(folder: Path) -> list[Path]:
    """Return the folders of a checkpoint's dense layers, in order. Raises FormatError for a path outside of it."""
    folders = []
    for module in read_modules(folder):
        name = str(module.get("path", ""))
        if not str(module.get("type", "")).endswith("Dense"):
            continue
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise FormatError(
                f"{folder / 'modules.json'}: the dense layer is in {short(name)}, not in a folder here", "QK-E111"
            )
        if (folder / name / "model.safetensors").is_file():
            folders.append(folder / name)
    return folders


def _file_name(folder: Path) -> str:
    """Return the name of a layer in files."""
    return "dense_2" if folder.name == "2_Dense" else "dense_3"


def _folders(config: Config) -> list[Path]:
    return dense_folders(config.path.parent) if config.get(OPTION) else []


def dense_tensors(config: Config) -> Iterator[Tensor]:
    """Yield the weights of the layers."""
    for folder in _folders(config):
        stored = read_header(folder / "model.safetensors").values()
        for tensor in sorted(stored, key=lambda t: t.offset):
            if tensor.name.endswith(".weight"):
                yield Tensor(tensor.name.replace("linear", _file_name(folder)), Stored(tensor), None)


def set_dense_widths(keys: Keys, config: Config) -> None:
    """Set the inputs and outputs of each layer, which llama.cpp needs to load them."""
    for folder in _folders(config):
        settings = optional_json(folder / "config.json")
        if settings is None:
            continue
        part = Config(folder / "config.json", {**settings, "architectures": ["Dense"]})
        keys.u32(f".{_file_name(folder)}_feat_in", part.number("in_features"))
        keys.u32(f".{_file_name(folder)}_feat_out", part.number("out_features"))


def omission_of(config: Config, files: Collection[Path], supported: bool) -> str | None:
    """Return a note on layers that the file lacks, None if it has all.

    Args:
        config: of the checkpoint.
        files: those that the file is made of.
        supported: the option includes them.
    """
    folder = config.path.parent
    names = [path.name for path in dense_folders(folder) if path / "model.safetensors" not in files]
    if not names:
        return None
    remedy = f"--{OPTION.replace('_', '-')} includes them" if supported else "llama.cpp has none for this architecture"
    return (
        f"{folder / 'modules.json'}: the dense layers after the pooling ({', '.join(names)}) are not in this file, so "
        f"embeddings differ: {remedy}"
    )
