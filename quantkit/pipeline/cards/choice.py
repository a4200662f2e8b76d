"""Which tensors cards encode, and why the CPU does the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quantkit.errors import RecipeError, ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.encode.encode import weighs
from quantkit.kernels.cuda.encode.pipeline import AnyForm, Form, can_decode, can_encode
from quantkit.kernels.cuda.encode.woven import is_changed
from quantkit.kernels.cuda.feedback.pipeline import FedForm
from quantkit.kernels.cuda.feedback.rounding import can_round
from quantkit.kernels.formats import FORMATS, SYMMETRIC, WOVEN_ENCODERS, encoder_for
from quantkit.kernels.interleave import base_of, is_woven, repacks
from quantkit.kernels.levels import all_levels
from quantkit.pipeline.feedback import rounding_of
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor, RowSlice
from quantkit.types import BY_NAME, TensorType

BACKENDS = ("cpu", "cuda", "auto")

_F32 = BY_NAME["F32"]


def why_not(tensor: PlannedTensor, part: RowSlice) -> str | None:
    """Return why a card does not encode a part, "" if there is nothing to encode on one; None if it does."""
    if part.is_copied(tensor.type) or part.refit is not None or repacks(part.source.type, tensor.type):
        return ""
    if part.inputs is not None and not tensor.type.is_quantized:
        return None if tensor.type is _F32 and part.inputs.corrects else f"no CUDA encoder for {tensor.type}"
    if part.inputs is not None and tensor.type.name in all_levels() and not can_round(tensor.type):
        return f"no error feedback for {tensor.type} on cards"
    base, search = _made(tensor), _search(tensor)
    if can_encode(base, search):
        return None
    return f"no CUDA encoder for {tensor.type}" + (f" by the search '{search}'" if search and can_encode(base) else "")


def _made(tensor: PlannedTensor) -> TensorType:
    """Return the type of what cards make: single rows, unless an encoder makes whole groups of them."""
    return tensor.type if tensor.type.name in WOVEN_ENCODERS else base_of(tensor.type)


def _whose(tensor: PlannedTensor) -> str:
    return encoder_for(tensor.type, tensor.encoder or None)


def _search(tensor: PlannedTensor) -> str:
    """Return whose search a tensor's values are found by, of a type for which there are several; else ""."""
    whose, known = _whose(tensor), FORMATS.get(base_of(tensor.type).name)
    return whose if whose == SYMMETRIC or whose == "ik" and known is not None and known.ik_encoder else ""


def forms_of(tensor: PlannedTensor, part: RowSlice) -> tuple[AnyForm, ...]:
    """Return the forms that a part's rows may have on a card; none if the CPU encodes them.

    What a card cannot decode, the CPU does. Of a woven type cards encode single rows, which it weaves together.
    """
    if why_not(tensor, part) is not None:
        return ()
    source = part.source.type if can_decode(part.source.type) else _F32
    base = _made(tensor)
    woven = is_woven(tensor.type) and _whose(tensor) == "ik" and is_changed(base)
    plain = Form(source, base, part.values, _search(tensor), woven)
    if part.inputs is None or not _is_fed(tensor):
        return (plain,)
    fed = FedForm(plain, part.inputs.n, part.inputs.corrects, rounding_of(part.inputs))
    return (fed, plain) if tensor.type.is_quantized else (fed,)


def _is_fed(tensor: PlannedTensor) -> bool:
    """Tell whether matrices of a tensor that has inputs are encoded with feedback, or corrected, if they are enough."""
    return tensor.type.name in all_levels() or not tensor.type.is_quantized


def form_of(tensor: PlannedTensor, part: RowSlice, matrix: int) -> AnyForm | None:
    """Return the form of a matrix's rows: one with too few tokens has a plain one; None if the CPU encodes them."""
    forms = forms_of(tensor, part)
    if len(forms) and part.inputs is not None and _is_fed(tensor) and part.inputs.damping(matrix) is None:
        forms = forms[1:]
    return forms[0] if forms else None


def weightings(tensor: PlannedTensor, part: RowSlice) -> set[bool]:
    """Tell whether a part's bytes depend on an importance, each matrix's own: of some, or of none."""
    if not weighs(base_of(tensor.type)):
        return {False}
    if part.found is not None:
        return {True}
    return {True, False} if part.inputs is not None and part.inputs.corrects else {False}


def segment_of(tensor: PlannedTensor, job: Job, form: AnyForm) -> object:
    """Return what jobs of one form have in common if their rows have one importance, and one metric."""
    alone = isinstance(form, FedForm) or True in weightings(tensor, tensor.parts[job.part])
    return (job.tensor, job.part, job.matrix) if alone else None


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
        woven += None in found and _made(tensor) is not tensor.type
        reasons[" on cards" if None in found else max(filter(None, found), default="")] += 1
    on_cards, _ = reasons.pop(" on cards", 0), reasons.pop("", 0)
    rest = ", ".join(f"{why} ({n})" for why, n in reasons.most_common())
    if not on_cards:
        return (), f"--backend {backend}: the CPU does everything: {rest or 'nothing is to be encoded'}"
    text = f"--backend {backend}: {', '.join(names)} encode{'s' * (len(names) == 1)} {_tensors(on_cards)}"
    if plan.executor is not None:
        text += ", the text runs through the model on the CPU: bytes are the same on every backend"
    if woven:
        text += f" (rows of {woven} are interleaved by the CPU)"
    return names, text + (f", the CPU {_tensors(reasons.total())}: {rest}" if rest else "")


def _tensors(n: int) -> str:
    return f"{n} tensor{'s' * (n != 1)}"
