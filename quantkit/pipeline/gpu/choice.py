"""The tensors that GPUs encode, and the reasons why the CPU encodes the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quantkit.errors import RecipeError, ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.encode.interleaved import is_changed
from quantkit.kernels.cuda.encode.pipeline import Conversion, RowConversion, can_decode, can_encode
from quantkit.kernels.cuda.feedback.pipeline import FeedbackConversion
from quantkit.kernels.cuda.feedback.rounding import can_round
from quantkit.pipeline.encoding import Action
from quantkit.pipeline.feedback import rounding_of
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.types import BY_NAME

BACKENDS = ("cpu", "cuda", "auto")

_F32 = BY_NAME["F32"]


def cpu_reason(part: PlannedPart) -> str | None:
    """Return the reason why a GPU does not encode a part, "" if it has nothing to encode; None if it does."""
    encoding, inputs = part.encoding, part.inputs
    if encoding.action is not Action.ENCODE:
        return ""
    missing = f"no CUDA encoder for {encoding.target}"
    if inputs is not None and not encoding.target.is_quantized:
        return None if encoding.target is _F32 and inputs.corrects else missing
    if encoding.has_feedback and not can_round(encoding.target):
        return f"no error feedback for {encoding.target} on GPUs"
    if encoding.keeps_grid:
        return "--keep-grid: exact blocks are searched on the CPU"
    if encoding.custom is not None:
        return f"{encoding.target} has an encoder from Python"
    if can_encode(encoding.encoder_type, encoding.search):
        return None
    if encoding.search and can_encode(encoding.encoder_type):
        missing += f" with the search '{encoding.search}'"
    return missing


def conversions_of(part: PlannedPart) -> tuple[Conversion, ...]:
    """Return the forms that a part's rows may have on a GPU; none if the CPU encodes them.

    The CPU decodes types that GPUs cannot. For an interleaved type, GPUs encode single rows, which the CPU interleaves.
    """
    if cpu_reason(part) is not None:
        return ()
    encoding = part.encoding
    source = encoding.source if can_decode(encoding.source) else _F32
    interleaved = encoding.is_interleaved and encoding.encoder == "ik" and is_changed(encoding.encoder_type)
    plain = RowConversion(source, encoding.encoder_type, part.values, encoding.search, interleaved)
    if part.inputs is None or not encoding.has_feedback:
        return (plain,)
    feedback = FeedbackConversion(plain, part.inputs.n, part.inputs.corrects, rounding_of(part.inputs))
    return (feedback, plain) if encoding.target.is_quantized else (feedback,)


def conversion_of(part: PlannedPart, matrix: int) -> Conversion | None:
    """Return the form of a matrix's rows, a plain one if it has too few tokens; None if the CPU encodes them."""
    forms = conversions_of(part)
    if len(forms) and part.inputs is not None and part.encoding.has_feedback and part.inputs.damping(matrix) is None:
        forms = forms[1:]
    return forms[0] if forms else None


def weightings(part: PlannedPart) -> set[bool]:
    """Return whether a part's matrices are encoded with an importance: {True}, {False}, or both."""
    if not part.encoding.is_weighted:
        return {False}
    if part.importance is not None:
        return {True}
    return {True, False} if part.inputs is not None and part.inputs.corrects else {False}


def segment_of(tensor: PlannedTensor, job: Job, form: Conversion) -> object:
    """Return a key that is equal for jobs of one form whose rows share importance and metric."""
    separate = isinstance(form, FeedbackConversion) or True in weightings(tensor.parts[job.part])
    return (job.tensor, job.part, job.matrix) if separate else None


def gpus_for(plan: Plan, backend: str, numbers: Sequence[int] = ()) -> tuple[tuple[str, ...], str]:
    """Return the GPUs for a plan, CUDA0, ..., and a note about them and the share of the CPU.

    numbers: of GPUs; all if empty.

    Raises:
        ResourceError: a GPU is missing, or there is none and ``backend`` is "cuda".
        RecipeError: no such backend, or GPUs are named for backend "cpu".
    """
    if backend not in BACKENDS:
        raise RecipeError(f"--backend {backend}: choose one of {', '.join(BACKENDS)}", "QK-E203")
    if backend == "cpu":
        if numbers:
            raise RecipeError("--devices selects GPUs: add --backend cuda or auto", "QK-E202")
        return (), ""
    count = devices.count_devices()
    missing = [f"CUDA{i}" for i in numbers if i >= count]
    if not count and (backend == "cuda" or numbers):
        raise ResourceError(f"--backend {backend}: no usable GPU: {devices.why_none()}", "QK-E411")
    if missing:
        raise ResourceError(f"--devices: no device {', '.join(missing)}; {devices.why_none()}", "QK-E411")
    names = tuple(f"CUDA{i}" for i in dict.fromkeys(numbers or range(count)))
    if not names:
        return (), f"--backend {backend}: the CPU encodes everything: {devices.why_none()}"
    reasons: Counter[str] = Counter()
    on_gpus = interleaved = 0
    for tensor in plan.tensors:
        cpu_reasons = [cpu_reason(part) for part in tensor.parts]
        if None in cpu_reasons:
            on_gpus += 1
            interleaved += any(part.encoding.encoder_type is not tensor.type for part in tensor.parts)
        elif reason := max(filter(None, cpu_reasons), default=""):
            reasons[reason] += 1
    summary = ", ".join(f"{text} ({n})" for text, n in reasons.most_common())
    if not on_gpus:
        return (), f"--backend {backend}: the CPU encodes everything: {summary or 'no tensor needs encoding'}"
    text = f"--backend {backend}: {', '.join(names)} encode{'s' * (len(names) == 1)} {_tensors(on_gpus)}"
    if plan.executor is not None:
        text += "; calibration runs the model on the CPU, so bytes are the same on every backend"
    if interleaved:
        text += f" (the CPU interleaves rows of {interleaved})"
    return names, text + (f", the CPU {_tensors(reasons.total())}: {summary}" if summary else "")


def _tensors(n: int) -> str:
    return f"{n} tensor{'s' * (n != 1)}"
