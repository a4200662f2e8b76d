"""Which tensors cards encode, and why the CPU does the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quantkit.errors import RecipeError, ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.encode.encode import weighs
from quantkit.kernels.cuda.encode.pipeline import Form, can_decode, can_encode
from quantkit.kernels.cuda.encode.woven import is_changed
from quantkit.kernels.formats import FORMATS, SYMMETRIC, WOVEN_ENCODERS, encoder_for
from quantkit.kernels.interleave import base_of, is_woven, repacks
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor, RowSlice
from quantkit.types import BY_NAME

BACKENDS = ("cpu", "cuda", "auto")

_F32 = BY_NAME["F32"]


def why_not(tensor: PlannedTensor, part: RowSlice) -> str | None:
    """Return why a card does not encode a part, "" if there is nothing to encode; None if it does."""
    if part.is_copied(tensor.type) or repacks(part.source.type, tensor.type):
        return ""
    if part.inputs is not None:
        return "error feedback"
    base, search = base_of(tensor.type), _search(tensor)
    if tensor.type.name not in WOVEN_ENCODERS and can_encode(base, search):
        return None
    return f"no CUDA encoder for {tensor.type}" + (f" by the search '{search}'" if search and can_encode(base) else "")


def _whose(tensor: PlannedTensor) -> str:
    return encoder_for(tensor.type, tensor.encoder or None)


def _search(tensor: PlannedTensor) -> str:
    """Return whose search a tensor's values are found by, of a type for which there are several; else ""."""
    whose, known = _whose(tensor), FORMATS.get(base_of(tensor.type).name)
    return whose if whose == SYMMETRIC or whose == "ik" and known is not None and known.ik_encoder else ""


def form_of(tensor: PlannedTensor, part: RowSlice) -> Form | None:
    """Return the form of a part's rows on a card; None if the CPU encodes them. What a card cannot decode, it does.

    Of a woven type cards encode single rows; the CPU weaves them together.
    """
    if why_not(tensor, part) is not None:
        return None
    source = part.source.type if can_decode(part.source.type) else _F32
    base = base_of(tensor.type)
    woven = is_woven(tensor.type) and _whose(tensor) == "ik" and is_changed(base)
    return Form(source, base, part.values, _search(tensor), woven)


def is_weighted(tensor: PlannedTensor, part: RowSlice) -> bool:
    """Tell whether a part's bytes depend on an importance."""
    return part.found is not None and weighs(base_of(tensor.type))


def segment_of(tensor: PlannedTensor, job: Job) -> object:
    """Return what jobs of one form have in common if their rows have one importance."""
    return (job.tensor, job.part, job.matrix) if is_weighted(tensor, tensor.parts[job.part]) else None


def cards_for(plan: Plan, backend: str, wanted: Sequence[int] = ()) -> tuple[tuple[str, ...], str]:
    """Return the cards that carry out a plan, CUDA0, ..., and a sentence that says so, and what the CPU does.

    wanted: numbers of cards; without, all.

    Raises:
        ResourceError: a card is not there, or none if ``backend`` is "cuda".
        RecipeError: no such backend, or cards are named for that of the CPU.
    """
    if backend not in BACKENDS:
        raise RecipeError(f"--backend {backend}: there are {', '.join(BACKENDS)}")
    if backend == "cpu":
        if wanted:
            raise RecipeError("--devices names CUDA cards: give --backend cuda, or auto, with it")
        return (), ""
    count = devices.count_devices()
    missing = [f"CUDA{i}" for i in wanted if i >= count]
    if not count and (backend == "cuda" or wanted):
        raise ResourceError(f"--backend {backend}: no card can be used: {devices.why_none()}")
    if missing:
        raise ResourceError(f"--devices: there is no {', '.join(missing)}; {devices.why_none()}")
    names = tuple(f"CUDA{i}" for i in dict.fromkeys(wanted or range(count)))
    if not names:
        return (), f"--backend {backend}: the CPU encodes everything: {devices.why_none()}"
    reasons: Counter[str] = Counter()
    woven = 0
    for tensor in plan.tensors:
        found = [why_not(tensor, part) for part in tensor.parts]
        woven += None in found and is_woven(tensor.type)
        reasons[" on cards" if None in found else max(filter(None, found), default="")] += 1
    on_cards, _ = reasons.pop(" on cards", 0), reasons.pop("", 0)
    rest = ", ".join(f"{why} ({n})" for why, n in reasons.most_common())
    if not on_cards:
        return (), f"--backend {backend}: the CPU does everything: {rest or 'nothing is to be encoded'}"
    text = f"--backend {backend}: {', '.join(names)} encode{'s' * (len(names) == 1)} {_tensors(on_cards)}"
    if woven:
        text += f" (rows of {woven} are interleaved by the CPU)"
    return names, text + (f", the CPU {_tensors(reasons.total())}: {rest}" if rest else "")


def _tensors(n: int) -> str:
    return f"{n} tensor{'s' * (n != 1)}"
