"""The numbers of a report, plain records that are kept as JSON, from which the page can be made again.

Only names of files are kept, no folders: a report is published. The fields are the keys of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.activations import RUNTIME
from quantkit.evaluate import Estimate
from quantkit.formats.own_json import read_own_json
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.pipeline.content import FileRecord
from quantkit.records import record
from quantkit.score import Accuracy, PairedAccuracy

#: Values of the first keys of a file; other versions are refused.
KIND, VERSION = "quantkit.report", 1

#: Called with a description of the step, the number of parts done and their total, 0 if unknown.
StepReport = Callable[[str, float, float], None]


class Quantile(NamedTuple):
    """``share`` of the tokens diverge by more than ``kld`` nats."""

    share: float
    kld: float


@dataclass(frozen=True)
class Quality:
    """Quality of a file on a text. ``key``: digest of text, base and settings; the fields after ``ppl`` need a base.

    ``ppl_ratio``: perplexity / that of the base; their errors cancel in part. ``kld``: nats per token; ``bound``: the
    most by which it is off because the base logits have only the most probable tokens. ``activations``: exact, or those
    of the runtime.
    """

    key: str
    n_scored: int
    n_ctx: int
    chunks: int
    ppl: Estimate
    ppl_base: Estimate | None = None
    ppl_ratio: Estimate | None = None
    kld: Estimate | None = None
    bound: float = 0.0
    same_top: Estimate | None = None
    rms_p_diff: Estimate | None = None
    quantiles: tuple[Quantile, ...] = ()
    activations: str = RUNTIME


@dataclass(frozen=True)
class TextQuality:
    """Divergence of a file from the base on one of several texts, in nats per token, and its perplexity / the base's.

    ``text``: the name of its file.
    """

    text: str
    n_scored: int
    kld: Estimate
    ppl_ratio: Estimate
    same_top: Estimate


@dataclass(frozen=True)
class Matrix:
    """A tensor of two or more dimensions.

    ``error``: relative root mean square error against the base, weighted by importance if ``weighted``; None: not
    measured. ``exact``: weights that ``quantize --keep-grid`` counted as exact; None: it did not keep a grid.
    """

    name: str
    kind: str
    layer: int | None
    type: str
    values: int
    nbytes: int
    error: float | None = None
    weighted: bool = False
    exact: int | None = None


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a test, such as pp512, with their standard deviation."""

    test: str
    rate: Estimate
    machine: str


@dataclass(frozen=True)
class TaskScore:
    """Accuracy on a file of multiple-choice tasks by a metric, "acc" or "acc_norm".

    ``tasks``: the file's name; ``kind``: its format, as in ``quantkit.score``. ``key``: digest of tasks and settings.
    ``difference``: from the base with the digest ``base``, on the same tasks; None without one.
    """

    tasks: str
    kind: str
    metric: str
    key: str
    accuracy: Accuracy
    difference: PairedAccuracy | None = None
    base: str = ""
    activations: str = RUNTIME


@dataclass(frozen=True)
class Support:
    """Whether a runtime loads a file; ``text``: the reason."""

    runtime: str
    loads: bool
    text: str


@dataclass(frozen=True)
class File:
    """A quantized file.

    ``errors_key``: digest of what its matrices were compared with; ``texts_key``: of the texts of ``by_text``, the base
    and the settings. ``content``: record of the measured file, by which
    measurements stay valid; None if nothing was measured.
    """

    name: str
    fingerprint: str
    shards: int
    nbytes: int
    tensor_bytes: int
    values: int
    preset: str
    by_type: tuple[tuple[str, int, int], ...]
    matrices: tuple[Matrix, ...]
    support: tuple[Support, ...]
    provenance: tuple[tuple[str, str], ...]
    command: str
    notes: tuple[str, ...] = ()
    quality: Quality | None = None
    errors_key: str = ""
    speeds: tuple[Speed, ...] = ()
    scores: tuple[TaskScore, ...] = ()
    by_text: tuple[TextQuality, ...] = ()
    texts_key: str = ""
    content: FileRecord | None = None

    @property
    def bpw(self) -> float:
        return 8 * self.tensor_bytes / max(1, self.values)

    @property
    def exact(self) -> tuple[int, int] | None:
        """Exact weights, and all weights, of matrices that keep their grid; None if there are none."""
        on_grid = [(m.exact, m.values) for m in self.matrices if m.exact is not None]
        return (sum(exact for exact, _ in on_grid), sum(values for _, values in on_grid)) if on_grid else None


@dataclass(frozen=True)
class Mmproj:
    """The file of the model's vision and audio encoders, which no measurement covers.

    ``encoders``: "vision", "audio" or both; ``facts``: as ``inspect`` shows them.
    """

    name: str
    nbytes: int
    encoders: tuple[str, ...]
    by_type: tuple[tuple[str, int, int], ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """The encoders: "vision encoder", "vision and audio encoders"."""
        return f"{' and '.join(self.encoders)} encoder{'s' * (len(self.encoders) > 1)}"


@dataclass(frozen=True)
class ModelSummary:
    """The model of all files."""

    name: str
    architecture: str
    values: int
    active: int | None
    facts: tuple[tuple[str, str], ...]
    #: Keys general.* for model cards: license, base_model, ...
    card: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Base:
    """The unquantized model. ``content``: as in ``File``."""

    name: str
    fingerprint: str
    nbytes: int
    types: tuple[str, ...]
    scores: tuple[TaskScore, ...] = ()
    content: FileRecord | None = None


@dataclass(frozen=True)
class Text:
    """The text that was evaluated."""

    name: str
    sha256: str
    nbytes: int


@dataclass(frozen=True)
class TensorCoverage:
    """Coverage of a matrix by the importance matrix: tokens of its experts (1 if dense); None: a .dat lacks them."""

    name: str
    kind: str
    layer: int | None
    present: bool
    experts: int
    never: int
    tokens_min: int | None
    tokens_median: float | None


@dataclass(frozen=True)
class Coverage:
    """An importance matrix. ``share``: of the matrices that have data; ``hardly``: tokens that are too few."""

    name: str
    datasets: tuple[str, ...]
    sha256: tuple[str, ...]
    share: float
    hardly: int
    tensors: tuple[TensorCoverage, ...]


@dataclass(frozen=True)
class GroupCost:
    """Divergence ``kld``, in nats, of quantizing a group alone to a type: measured, or without ``error`` estimated."""

    group: str
    kind: str
    layer: int | None
    tensors: tuple[str, ...]
    type: str
    kld: float
    error: float | None


@dataclass(frozen=True)
class Costs:
    """A sensitivity file."""

    name: str
    text: str
    costs: tuple[GroupCost, ...]


@dataclass(frozen=True)
class Report(HtmlTable):
    """All numbers of a page."""

    title: str
    made: str
    version: str
    model: ModelSummary
    files: tuple[File, ...]
    base: Base | None = None
    text: Text | None = None
    imatrix: Coverage | None = None
    sensitivity: Costs | None = None
    notes: tuple[str, ...] = ()
    #: The first is the one that page and card name in commands.
    mmproj: tuple[Mmproj, ...] = ()

    @property
    def base_digest(self) -> str:
        """Digest of the base; "" without one."""
        content = None if self.base is None else self.base.content
        return "" if content is None else content.digest

    def by_size(self) -> Report:
        """Return the report with its files from the smallest to the largest, as page and card show them."""
        return replace(self, files=tuple(sorted(self.files, key=lambda f: f.nbytes)))

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"kind": KIND, "format": VERSION, **asdict(self)}, indent=1) + "\n"

    def as_table(self) -> Table:
        """Return the files, the smallest first; divergences in nats per token."""
        rows = (
            (f.name, f.preset, f.nbytes, f.bpw, None if kld is None else kld.value)
            for f in sorted(self.files, key=lambda f: f.nbytes)
            for kld in [None if f.quality is None else f.quality.kld]
        )
        return table_of("file, preset, bytes, bpw, KL divergence", rows, self.title)


def digest_of(*parts: object) -> str:
    """Return a digest of values of JSON: the key of measurements that depend on them."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_data(path: Path) -> Report:
    """Return the report in a JSON file. Raises FormatError with the name of the file."""

    def parse(data: Any) -> Report:
        if data.pop("kind") != KIND or data.pop("format") != VERSION:
            raise ValueError(f"another kind of file, or another version than {VERSION}")
        report: Report = record(Report, data)
        return report

    return read_own_json(path, "the data of a quantkit report", parse)
