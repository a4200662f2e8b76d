"""Optional packages: the purpose of each extra, and the pip command for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from quantkit.errors import ResourceError


@dataclass(frozen=True, eq=False)
class Extra:
    """An extra of pyproject.toml: its ``name`` ("": none has the packages), its purpose, and PyPI names by module."""

    name: str
    purpose: str
    packages: Mapping[str, str]

    def missing(self) -> list[str]:
        """Return the PyPI names of missing packages; nothing is imported."""
        return [package for module, package in self.packages.items() if find_spec(module) is None]


SEARCH = Extra("search", "search", {"scipy": "scipy"})
REPORT = Extra("report", "reports", {"vl_convert": "vl-convert-python", "jinja2": "jinja2"})
PLOT = Extra("plot", "plots", {"matplotlib": "matplotlib"})
CHAT = Extra("run", "chat templates", {"jinja2": "jinja2"})
PRE_TOKENIZER = Extra("convert", "pre-tokenizers without --pre", {"tokenizers": "tokenizers"})
MODEL_CARD = Extra("convert", "the front matter of README.md", {"yaml": "pyyaml"})
COMPRESSION = Extra("run", "compressed logits", {"zstandard": "zstandard"})
HUB = Extra("hub", "the Hugging Face Hub", {"huggingface_hub": "huggingface_hub"})
HASHES = Extra("hash", "xxh3", {"xxhash": "xxhash"})
GPUS = Extra("cuda12", "GPUs; cuda13 for newer drivers", {"cupy": "cupy-cuda12x[ctk]"})
CLUSTERS = Extra("ray", "clusters", {"ray": "ray"})
URLS = Extra("remote", "URLs", {"fsspec": "fsspec", "aiohttp": "aiohttp"})

#: Module and PyPI name of the package of a scheme of URLs that needs more than fsspec.
STORE_PACKAGES = {
    "s3": ("s3fs", "s3fs"),
    "gs": ("gcsfs", "gcsfs"),
    **dict.fromkeys(("http", "https"), ("aiohttp", "aiohttp")),
    **dict.fromkeys(("abfs", "adl"), ("adlfs", "adlfs")),
    "hf": ("huggingface_hub", "huggingface_hub"),
    "sftp": ("paramiko", "paramiko"),
}


def store_extras(scheme: str) -> tuple[Extra, ...]:
    """Return the extras that URLs of a scheme need."""
    url, (module, package) = f"{scheme}://", STORE_PACKAGES.get(scheme, ("", ""))
    if module in ("", "aiohttp"):
        return (Extra("remote", url, {"fsspec": "fsspec", **({module: package} if module else {})}),)
    return Extra("remote", url, {"fsspec": "fsspec"}), Extra("", url, {module: package})


#: The extras of ``[all]``, and those that need a GPU, a cluster or a store.
ALL = (COMPRESSION, CHAT, PRE_TOKENIZER, MODEL_CARD, PLOT, SEARCH, REPORT, HASHES)
ON_REQUEST = (GPUS, CLUSTERS, URLS, HUB)


class MissingPackages(ResourceError):
    """Optional packages of ``extras`` are not installed."""

    default_code = "QK-E410"

    extras: tuple[Extra, ...] = ()


def missing_packages(*extras: Extra, hint: str = "") -> MissingPackages:
    """Return the error for missing packages of these extras, with one pip command; ``hint``: an alternative."""
    needs = "; ".join(f"{', '.join(e.missing() or e.packages.values())} (for {e.purpose})" for e in extras)
    names = ",".join(sorted({extra.name for extra in extras if extra.name}))
    packages = [f"'gguf-quantkit[{names}]'"] * bool(names)
    packages += dict.fromkeys(p for extra in extras if not extra.name for p in extra.packages.values())
    error = MissingPackages(f"not installed: {needs}: pip install {' '.join(packages)}{hint and f'; {hint}'}")
    error.extras = extras
    return error


def check_extras(*extras: Extra, hint: str = "") -> None:
    """Raise MissingPackages with all packages of these extras that are not installed."""
    if missing := [extra for extra in extras if extra.missing()]:
        raise missing_packages(*missing, hint=hint)
