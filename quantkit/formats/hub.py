"""Models of the Hugging Face Hub by the name that llama.cpp gives them: ORGANIZATION/REPOSITORY:TYPE.

They are downloaded once, to a folder of the cache: the engine maps its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.errors import ResourceError
from quantkit.formats.outputs import Output, atomic_write
from quantkit.formats.remote.common import Facts
from quantkit.formats.remote.reader import fetch
from quantkit.formats.remote.url import URL, default_spool

#: The type of a name without one, as in llama.cpp.
_DEFAULT_TYPE = "Q4_K_M"
_NAME = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")


def download_model(name: str, file: str | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Download a model and return its file, or the first shard; files that are there are not loaded again.

    ``file`` names a file of the repository instead of the type. Raises ResourceError, OSError.
    """
    repository, shards = _find(name, file)
    folder = default_spool().parent / "models" / repository
    return [_download(url, folder / url.name, say) for url in shards][0]


def _find(name: str, file: str | None) -> tuple[str, list[URL]]:
    """Return the repository, and the file or all its shards in order."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ResourceError(f"-hf {name}: write ORGANIZATION/REPOSITORY or ORGANIZATION/REPOSITORY:TYPE", "QK-E203")
    repository, type_name = match[1], match[2]
    root = URL(f"hf://{repository}")
    if file is not None:
        folder, _, first = file.rpartition("/")
        place = root / folder if folder else root
        return repository, _shards(place, first, list(place.listing or ()))
    listing = root.listing or {}
    models = sorted(n for n in listing if n.endswith(".gguf") and "mmproj" not in n.lower())
    first_name = _of_type(models, type_name or _DEFAULT_TYPE) or (models[0] if models and not type_name else None)
    if first_name is not None:
        return repository, _shards(root, first_name, models)
    for folder_name in _folders(listing, type_name or _DEFAULT_TYPE):
        files = sorted(n for n in (root / folder_name).listing or () if n.endswith(".gguf"))
        if files:
            return repository, _shards(root / folder_name, files[0], files)
    names = ", ".join(models) or "no GGUF file (of a checkpoint: quantkit convert hf://" + repository + " OUT.gguf)"
    raise ResourceError(f"-hf {name}: no file of type {type_name or _DEFAULT_TYPE}; choose one of {names}", "QK-E210")


def _of_type(names: Sequence[str], type_name: str) -> str | None:
    """Return the first name with the type as a separate word: not Q4_K_M's file for Q4_K."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(type_name)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return next((n for n in names if word.search(n)), None)


def _folders(listing: dict[str, Facts | None], type_name: str) -> list[str]:
    names = sorted(name for name, facts in listing.items() if facts is None)
    return [name for name in names if _of_type([name], type_name)]


def _shards(place: URL, name: str, names: Sequence[str]) -> list[URL]:
    match = _SHARD.fullmatch(name)
    if match is None:
        return [place / name]
    return [place / n for n in sorted(names) if (m := _SHARD.fullmatch(n)) and m[1] == match[1]]


def _download(url: URL, path: Path, say: Callable[[str], None]) -> Path:
    """Copy an object to a file, unless a file of its size is there. Raises ResourceError if another run copies it."""
    size = url.facts.size
    if path.exists() and path.stat().st_size == size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with Output(path, overwrite=True), atomic_write(path) as part, open(part, "w+b") as out:
        say(f"downloading {url}, {size / 1e6:.0f} MB, to {path}")
        fetch(url, out)
    return path
