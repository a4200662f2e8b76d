"""The runtimes that load a model, judged by its whole header, and the tensors that their GPUs cannot run.

Sources: ``quantkit.loaders`` (keys, vocabulary, tensors, shapes), and the supports_op of CUDA in llama.cpp b11434 and
ik_llama.cpp 8337e4cd3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.rules import GGML_DIMS
from quantkit.loaders import Problem, ProblemKind, architectures, describe, load
from quantkit.loaders.libmtmd import kind_of, missing_tensors
from quantkit.names import printable, shorten
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.types import TensorType

#: Names of runtimes in the table of types, by the runtime's name.
TREES = {"llama.cpp": "mainline", "ik_llama.cpp": "ik"}

#: ggml's tensor names have 64 bytes with the final zero.
_MAX_TENSOR_NAME = 63

#: Types without CUDA kernels; their tensors remain on the CPU. Of ik's interleaved types, only a few have them.
_CPU_ONLY = frozenset({"TQ1_0", "TQ2_0", "Q8_KV", "I2_S"})
_INTERLEAVED_ON_CUDA = frozenset(
    {"IQ2_K_R4", "IQ3_K_R4", "IQ4_K_R4", "IQ5_K_R4", "IQ4_KS_R4", "IQ5_KS_R4", "IQ1_S_R4", "IQ1_M_R4"}
)
_CPU_ONLY_IN_IK = frozenset({"Q1_0"})

#: The architecture of mmproj files.
CLIP = "clip"
#: Files that no runtime loads by themselves: general.type or architecture -> how they are loaded.
_PARTS = {
    "adapter": "an adapter is loaded together with its model",
    "mmproj": "an mmproj file is loaded together with its text model",
    CLIP: "an mmproj file is loaded together with its text model",
    "vocab": "a vocabulary has no tensors",
    "imatrix": "an importance matrix is not a model",
}

#: Architectures of draft models, which need the context of their target to run.
_DRAFTS = frozenset({"dflash", "eagle3", "gemma4-assistant"})

#: A tensor of a header: name, type, shape in ggml's order.
Entry = tuple[str, TensorType, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime and a model: the problems that prevent loading, or running entirely on a GPU."""

    name: str
    #: Problems that prevent loading, in words; empty if it loads.
    problems: tuple[str, ...]
    #: The reason why the file was not checked, "" if it was.
    not_checked: str = ""
    #: Problems of the header, regardless of types.
    gaps: tuple[Problem, ...] = ()
    unknown_types: tuple[str, ...] = ()
    #: Tensors whose names are longer than ggml holds.
    long_names: tuple[str, ...] = ()
    #: Types without CUDA kernels.
    cpu_types: tuple[str, ...] = ()
    #: It is a draft model, loaded together with its target.
    draft: bool = False

    @property
    def loads(self) -> bool:
        """Whether the runtime loads the file; False if not checked."""
        return not self.problems and not self.not_checked

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for programs: ``loads`` is null if not checked."""
        return {
            "loads": None if self.not_checked and not self.problems else self.loads,
            "problems": list(self.problems),
            "not_checked": self.not_checked or None,
            "unknown_types": list(self.unknown_types),
            "long_names": list(self.long_names),
            "cpu_types": list(self.cpu_types),
        }

    def __str__(self) -> str:
        if self.problems:
            return f"does not load: {'; '.join(self.problems)}"
        if self.not_checked:
            return f"not checked: {self.not_checked}"
        loads = "loads beside its target" if self.draft else "loads"
        if self.cpu_types:
            verb = "stays" if len(self.cpu_types) == 1 else "stay"
            return f"{loads}; on CUDA, {', '.join(self.cpu_types)} {verb} on the CPU"
        return f"{loads}, on CPU and CUDA"


def runtimes(fields: Mapping[str, Field], tensors: Iterable[Entry], *, displaced: str = "") -> tuple[Runtime, Runtime]:
    """Return the verdicts of llama.cpp and ik_llama.cpp on a file with this header.

    Args:
        fields: all its metadata, or only general.architecture to check just the architecture and types.
        tensors: name, type and shape of each tensor.
        displaced: a tensor whose data does not follow that of the previous tensor, which llama.cpp rejects.
    """
    entries = tuple(tensors)
    mainline, ik = (_runtime(name, fields, entries) for name in TREES)
    if displaced:
        problem = f"the data of {shorten(printable(displaced), 40)} does not follow the previous tensor"
        mainline = replace(mainline, problems=(*mainline.problems, problem))
    return mainline, ik


def is_known(architecture: str) -> bool:
    """Return whether any runtime has an architecture."""
    return architecture == CLIP or any(architecture in architectures(name) for name in TREES)


def check_complete(fields: Mapping[str, Field], tensors: Iterable[Entry], subject: str, *, extra: bool = True) -> None:
    """Raise FormatError if a header lacks something that every runtime of the architecture needs.

    ``subject`` names the file and, if known, the cause. ``extra``: also refuse tensors unknown to all runtimes.
    """
    arch = _text(fields, "general.architecture")
    if arch == CLIP:
        _check_encoders(fields, {name for name, _, _ in tensors}, subject)
        return
    checked = [r for r in runtimes(fields, tensors) if not r.not_checked and arch in architectures(r.name)]
    gaps = {r.name: [gap for gap in r.gaps if extra or gap.kind is not ProblemKind.UNKNOWN] for r in checked}
    if not gaps or not all(gaps.values()):
        return
    name = next(iter(gaps))
    reasons = "; ".join(describe(gaps[name]))
    raise FormatError(
        f"{subject}: incomplete; {name} does not load it: {reasons}; use --allow-incomplete to write it anyway",
        "QK-E105",
    )


def _check_encoders(fields: Mapping[str, Field], names: set[str], subject: str) -> None:
    """Raise FormatError if the encoders of an mmproj file lack tensors."""
    missing, _ = missing_tensors({key: field.value for key, field in fields.items()}, names)
    if missing:
        count = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise FormatError(
            f"{subject}: incomplete; its encoders lack {missing[0]}{count}; use --allow-incomplete to write the file "
            "anyway",
            "QK-E105",
        )


_NOT_OPENED = "llama.cpp b11434 does not open this mmproj file, as that of convert_hf_to_gguf.py"
#: The row of Pixtral's token at the end of a row of patches.
_BREAK = "v.token_embd.img_break"


def encoder_notes(fields: Mapping[str, Field], tensors: Iterable[Entry]) -> list[str]:
    """Return notes on an mmproj file that llama.cpp does not open, as the reference's is."""
    _, unwritten = missing_tensors(
        {key: field.value for key, field in fields.items()}, {name for name, _, _ in tensors}
    )
    notes = []
    if unwritten:
        names = ", ".join(dict.fromkeys(map(kind_of, unwritten)))
        remedy = "; --mistral-format writes it, from consolidated*.safetensors" if _BREAK in unwritten else ""
        notes.append(f"{_NOT_OPENED}: it lacks {names}{remedy}")
    for key in ("clip.vision.image_mean", "clip.vision.image_std"):
        if key in fields and fields[key].item_type is not ValueType.FLOAT32:
            name = key.rpartition(".")[2]
            notes.append(
                f"{_NOT_OPENED}: {key} has integers; write {name} of preprocessor_config.json with decimals, as in 0.0"
            )
    return notes


def _runtime(name: str, fields: Mapping[str, Field], entries: Sequence[Entry]) -> Runtime:
    tree, arch = TREES[name], _text(fields, "general.architecture")
    types = {t.name: t for _, t, _ in entries}
    unknown = tuple(sorted(t.name for t in types.values() if t.trees not in (tree, "both")))
    on_cpu = tuple(sorted(t.name for t in types.values() if t.name not in unknown and not _on_cuda(t, tree)))
    long_names = tuple(tensor for tensor, _, _ in entries if len(tensor.encode()) > _MAX_TENSOR_NAME)
    problems = [f"no tensor type {', '.join(unknown)}"] if unknown else []
    part = _PARTS.get(_text(fields, "general.type")) or _PARTS.get(arch)
    gaps: tuple[Problem, ...] = ()
    not_checked = part or ""
    if arch == CLIP and tree == "mainline" and len(fields) > 1:
        problems += _encoder_problems(fields, {tensor for tensor, _, _ in entries})
    if not part and arch not in architectures(name):
        problems.insert(0, f"no architecture {printable(arch)}" if arch else "general.architecture: missing")
    elif not part:
        shapes = {tensor: shape for tensor, _, shape in entries}
        tensor_types = {tensor: t for tensor, t, _ in entries}
        verdict = None if len(fields) <= 1 else load(name, fields, shapes, tensor_types)
        if verdict is None:
            not_checked = f"quantkit has only the architecture and types of {printable(arch)}"
        gaps = verdict or ()
        problems += _words(gaps)
    if deep := next((tensor for tensor, _, shape in entries if len(shape) > GGML_DIMS), ""):
        problems.append(f"{shorten(printable(deep), 40)} has more than {GGML_DIMS} dimensions")
    if long_names:
        first = shorten(printable(long_names[0]), 40)
        problems.append(f"{len(long_names)} tensor names are longer than {_MAX_TENSOR_NAME} bytes ({first})")
    return Runtime(name, tuple(problems), not_checked, gaps, unknown, long_names, on_cpu, arch in _DRAFTS)


def _encoder_problems(fields: Mapping[str, Field], names: set[str]) -> list[str]:
    """Return the tensors that an mmproj file lacks and llama.cpp requires, in words."""
    lacking = dict.fromkeys(
        kind_of(name)
        for part in missing_tensors({key: field.value for key, field in fields.items()}, names)
        for name in part
    )
    if not lacking:
        return []
    count = f" and {len(lacking) - 2} others" if len(lacking) > 2 else ""
    return [f"it lacks {', '.join(list(lacking)[:2])}{count}"]


def _words(gaps: Sequence[Problem]) -> list[str]:
    """Return problems as text, with the command that fixes them, if any."""
    unknown = {gap.subject for gap in gaps if gap.kind is ProblemKind.UNKNOWN}
    words = []
    if any(MERGED in name for name in unknown):
        words.append("no merged up and gate experts for this architecture (quantkit split-up-gate)")
        gaps = [gap for gap in gaps if not any(kind in gap.subject for kind in (MERGED, GATE, UP))]
    if EXTRA_OUTPUT in unknown:
        words.append(f"no {EXTRA_OUTPUT} for this architecture")
        gaps = [gap for gap in gaps if gap.subject != EXTRA_OUTPUT]
    return [*words, *describe(gaps)]


def _text(fields: Mapping[str, Field], key: str) -> str:
    field = fields.get(key)
    return field.value if field is not None and isinstance(field.value, str) else ""


def _on_cuda(t: TensorType, tree: str) -> bool:
    if t.interleave > 1:
        return t.name in _INTERLEAVED_ON_CUDA
    return t.name not in (_CPU_ONLY | _CPU_ONLY_IN_IK if tree == "ik" else _CPU_ONLY)
