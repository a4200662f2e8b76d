"""Whether a model loads: quantkit's verdict, and that of the runtimes' own loaders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conftest import ik_libraries, llama_programs
from libllama import Libllama
from quantkit.errors import QuantkitError
from quantkit.inspect import inspect
from sparse_models import Model


@dataclass(frozen=True)
class Verdict:
    """Whether a runtime loads a model, and the reason if not.

    For a model that loads, ``why`` is the library's message if it cannot create a context.
    """

    loads: bool
    why: str


@contextmanager
def file_of(model: Model) -> Iterator[Path]:
    """Write a model, its weights holes, for the duration of the context."""
    with tempfile.TemporaryDirectory() as folder:
        yield model.write(Path(folder, "model.gguf"))


def quantkit_verdicts(path: Path) -> dict[str, Verdict]:
    """Return quantkit's verdict for each runtime.

    A file that quantkit cannot read does not load in llama.cpp. ik_llama.cpp loads some of them (a repeated key, rows
    with partial blocks, unaligned data), which have no verdict.
    """
    try:
        judged = inspect(path).runtimes
    except QuantkitError as error:
        return {"llama.cpp": Verdict(False, f"cannot be read: {error}")}
    return {runtime.name: Verdict(runtime.loads, "; ".join(runtime.problems)) for runtime in judged}


def runtime_verdict(path: Path, model: Model, library: Libllama) -> Verdict:
    """Return whether a library loads the model at ``path``."""
    loading = library.load(path, model.layout()[0])
    return Verdict(loading.loads, loading.complaint)


#: quantkit's names of the runtimes.
RUNTIMES = ("llama.cpp", "ik_llama.cpp")
#: Architectures of ik_llama.cpp 8337e4cd3, whose loader quantkit implements, that its older wheel lacks.
# fmt: off
NOT_IN_THE_WHEEL = frozenset({
    "bailingmoe3", "cohere2_moe", "deepseek4", "dflash", "dflash-draft", "gemma4-assistant", "gemma4_mtp", "laguna",
    "mellum", "minimax-m3", "muse-glimmer", "openpangu",
})
#: Models whose requirements changed after the wheel's commit (#2250, #2322, #2324).
NEWER_MODELS = frozenset({
    "convert/fused-gate-up-mtp", "convert/gemma4", "convert/gemma4-unified", "convert/qwen3.5-moe", "convert/step3p5",
})
# fmt: on


def libraries() -> dict[str, Libllama]:
    """Return the installed runtimes, by name."""
    folders = {"llama.cpp": llama_programs(), "ik_llama.cpp": ik_libraries()}
    return {name: Libllama(folder, ik=name.startswith("ik")) for name, folder in folders.items() if folder}


def verdicts(model: Model, runtimes: Mapping[str, Libllama]) -> dict[str, tuple[Verdict, Verdict]]:
    """Return quantkit's verdict and the library's, by the runtime's name, for each that is not older than the model."""
    with file_of(model) as path:
        own_verdicts = quantkit_verdicts(path)
        return {
            name: (own_verdicts[name], runtime_verdict(path, model, library))
            for name, library in runtimes.items()
            if name in own_verdicts and not is_too_old(library, model)
        }


def is_too_old(library: Libllama, model: Model) -> bool:
    """Return whether a library is the wheel's, and the model is newer."""
    is_newer = model.architecture in NOT_IN_THE_WHEEL or model.name in NEWER_MODELS
    return library.ik and is_newer and "QUANTKIT_IK_LIB" not in os.environ
