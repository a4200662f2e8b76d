"""What a report measures, or takes from the data of an earlier run where nothing has changed since.

Each file is compared with the base on a text (``evaluate``), matrix by matrix (``compare``), and timed (``bench``).
After each of these steps the data are written, so that a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from quantkit.bench import Setting, Test, bench, cpu_name
from quantkit.calibration import calibrated_on, sketch_of
from quantkit.compare import compare
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate import Estimate, Kld, KldProgress, KldSums, PerplexityProgress, SaveLogits, kld, perplexity
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.gguf import open_gguf, open_model
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.logits import open_logits
from quantkit.formats.outputs import read_text
from quantkit.imatrix import coverage
from quantkit.inspect import Inspection, inspect
from quantkit.names import printable, shorten, tensor_class
from quantkit.pipeline.facts import layer_of, n_dims
from quantkit.report.data import (
    Base,
    Costs,
    Coverage,
    Covered,
    Facts,
    File,
    GroupCost,
    Matrix,
    Quality,
    Quantile,
    Report,
    Speed,
    Support,
    Text,
)
from quantkit.report.made import command, provenance
from quantkit.sensitivity import read_sensitivity
from quantkit.sensitivity.file import LAYER
from quantkit.version import __version__

#: Shares of the tokens that diverge by more than what is reported for them.
SHARES = (0.9, 0.75, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: general.* that a model card repeats.
_CARD_KEYS = (
    *("license", "license.name", "license.link", "languages", "tags", "base_model.0.repo_url", "base_model.0.name"),
    *("base_model.0.organization", "source.repo_url", "repo_url", "organization", "size_label"),
)

#: Called with what is being done, and chunks done and to do, 0 if unknown.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a report measures, and on what.

    ``base``: the unquantized model; ``text``: held-out text; ``logits``: base logits, written if they are not there.
    ``known``: what was measured already against ``logits``, by file. ``errors``: compare every matrix with the base.
    ``bench``: tokens of a prompt and of a generation to time, and how often; () for none.
    """

    base: Path | None = None
    text: Path | None = None
    logits: Path | None = None
    known: Mapping[Path, Quality] = field(default_factory=dict)
    n_ctx: int = 512
    chunks: int | None = None
    n_batch: int = 2048
    imatrix: Path | None = None
    sensitivity: Path | None = None
    errors: bool = True
    bench: tuple[int, int, int] | tuple[()] = ()
    title: str = ""
    load: LoadOptions = field(default_factory=LoadOptions)


def measured(
    paths: Sequence[Path],
    options: ReportOptions,
    old: Report | None,
    keep: Callable[[Report], None],
    progress: Progress,
) -> Report:
    """Return the numbers of files; ``keep`` is called with what there is after each step.

    Raises:
        QuantkitError: a file cannot be read, belongs to another model, or options contradict each other.
    """
    _check(options)
    found = _each_once(paths)
    paths = [each.path for each in found]
    names = [each.path.name for each in found]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise RecipeError(f"two files are called {twice}: a report names files without their folders; rename one")
    of = {f.fingerprint: f for f in old.files} if old is not None else {}
    base = inspect(options.base) if options.base is not None else None
    for each in found:
        _check_alike(found[0] if base is None else base, each)
    files = [_file(each, of.get(_fingerprint(each.path))) for each in found]
    # Without a text, what an earlier run measured stands, and what it measured on.
    kept = old if options.text is None and options.logits is None else None
    report = Report(
        title=options.title or f"{found[0].name or found[0].path.stem}: GGUF quantizations",
        made=datetime.now(UTC).strftime("%Y-%m-%d"),
        version=__version__,
        model=_facts(found[0] if base is None else base),
        files=tuple(files),
        base=kept.base if kept and base is None else None if base is None else _base(base),
        text=kept.text if kept else _text(options.text),
        imatrix=(old.imatrix if old else None)
        if options.imatrix is None
        else _coverage(options.imatrix, found[0].path),
        sensitivity=(old.sensitivity if old else None) if options.sensitivity is None else _costs(options.sensitivity),
    )
    keep(report)
    for step in (_with_qualities, _with_errors, _with_speeds):
        for i, made in step(report, paths, options, progress):
            files[i] = made
            report = replace(report, files=tuple(files))
            keep(report)
    return report


def _each_once(paths: Iterable[Path]) -> list[Inspection]:
    """Return what is in files, shards of one model as that model: a pattern of names finds all of them."""
    found: dict[Path, Inspection] = {}
    for each in map(inspect, paths):
        first = each.shards[0].path
        found.setdefault(first, replace(each, path=first))
    return list(found.values())


def _check(options: ReportOptions) -> None:
    if options.logits is not None and not options.logits.exists() and None in (options.base, options.text):
        raise RecipeError(f"{options.logits} is not there: it is made of --base and a text (-f), so give both")
    if options.base is not None and options.text is None and options.logits is None and not options.errors:
        raise RecipeError("nothing is compared with --base: give a text (-f), too")


def _check_alike(a: Inspection, b: Inspection) -> None:
    if a.architecture != b.architecture:
        raise QuantkitError(
            f"{b.path} is a model of {printable(b.architecture)}, {a.path} one of {printable(a.architecture)}:"
            " a report is about one model"
        )


def _fingerprint(path: Path) -> str:
    with open_model(path) as file:
        return file.fingerprint()


# ---------------------------------------------------------------- without measuring


def _facts(found: Inspection) -> Facts:
    keys = {f"general.{key}" for key in _CARD_KEYS}
    shown = [(fact.label, printable(fact.value)) for fact in found.facts if not fact.counts]
    card = [(f.key, _listed(f.value)) for f in found.fields if f.key in keys]
    name = shorten(printable(found.name or found.path.stem), 200)
    return Facts(name, found.architecture, found.total.values, found.active_values, tuple(shown), tuple(card))


def _listed(value: object) -> str:
    return ",".join(map(printable, value)) if isinstance(value, (list, tuple)) else printable(value)


def _base(found: Inspection) -> Base:
    types = tuple(g.name for g in found.by_type)
    return Base(printable(found.path.name), _fingerprint(found.path), found.file_bytes, types)


def _text(path: Path | None) -> Text | None:
    if path is None:
        return None
    raw = read_text(path)
    return Text(printable(path.name), hashlib.sha256(raw).hexdigest(), len(raw))


def _file(found: Inspection, old: File | None) -> File:
    matrices = (_matrix(t.name, t.type.name, t.shape, t.nbytes) for t in found.tensors if n_dims(t.shape) > 1)
    made = File(
        name=printable(found.path.name),
        fingerprint=_fingerprint(found.path),
        shards=len(found.shards),
        nbytes=found.file_bytes,
        tensor_bytes=found.total.nbytes,
        values=found.total.values,
        preset=found.file_type_name.partition(" or ")[0],
        by_type=tuple((g.name, g.tensors, g.nbytes) for g in found.by_type),
        matrices=tuple(matrices),
        support=tuple(Support(r.name, r.loads, str(r)) for r in found.runtimes),
        provenance=provenance(found),
        command=command(found),
    )
    if old is None:
        return made
    kept = {m.name: m for m in old.matrices}
    matrices_kept = tuple(kept.get(m.name, m) for m in made.matrices)
    errors = {"matrices": matrices_kept, "errors_key": old.errors_key}
    return replace(made, quality=old.quality, speeds=old.speeds, notes=old.notes, **errors)  # type: ignore[arg-type]


def _matrix(name: str, type_name: str, shape: Sequence[int], nbytes: int) -> Matrix:
    layer = layer_of(name)
    values = int(np.prod([int(n) for n in shape], dtype=object))
    shown = printable(name)
    return Matrix(shown, printable(tensor_class(name)), layer if layer >= 0 else None, type_name, values, nbytes)


def _coverage(path: Path, model: Path) -> Coverage:
    imatrix = read_imatrix(path)
    with open_gguf(model) as file:
        arch = str(file.get("general.architecture", ""))
        found = coverage(imatrix, file.tensors.values(), arch=arch)
    sketch = sketch_of(imatrix)
    tensors = []
    for t in found.tensors:
        if t.expected is False:
            continue
        told = t.counts.size > 0 and not t.estimated
        least, median = (int(t.counts.min()), float(np.median(t.counts))) if told else (None, None)
        layer = layer_of(t.name) if layer_of(t.name) >= 0 else None
        there = t.entry is not None
        tensors.append(Covered(printable(t.name), printable(t.kind), layer, there, t.experts, t.never, least, median))
    texts = tuple(printable(name).rpartition("/")[2] for name in imatrix.datasets)
    hashes = () if sketch is None else sketch.sha256
    return Coverage(printable(path.name), texts, hashes, found.share, found.hardly, tuple(tensors))


def _costs(path: Path) -> Costs:
    found = read_sensitivity(path)
    groups = {g.name: g for g in found.groups}
    costs = []
    for cost in found.costs:
        group = groups[cost.group]
        kld = cost.kld if cost.kld is not None else cost.proxies.get(LAYER)
        if kld is not None and not cost.feedback:
            names = tuple(map(printable, group.tensors))
            shown = printable(group.name), printable(group.kind), group.layer, names
            costs.append(GroupCost(*shown, cost.type.name, float(kld), cost.kld_error))
    text = ", ".join(printable(f) for f in found.text.get("files", ()))
    return Costs(printable(path.name), shorten(text, 200), tuple(costs))


# ---------------------------------------------------------------- quality


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _with_qualities(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: Progress
) -> Iterator[tuple[int, File]]:
    if options.text is None and options.logits is None:
        return
    key = _quality_key(report, options)
    wanted = [i for i, f in enumerate(report.files) if f.quality is None or f.quality.key != key]
    if not wanted:
        return
    if options.base is None and options.logits is None:
        for i in wanted:
            yield i, _with_perplexity(report.files[i], paths[i], options, key, progress)
        return
    with _base_logits(report, options, progress) as logits:
        for i in wanted:
            yield i, _with_divergence(report.files[i], paths[i], logits, options, key, progress)


def _quality_key(report: Report, options: ReportOptions) -> str:
    if options.logits is not None and options.logits.exists():
        file = open_logits(options.logits)
        tokens = hashlib.sha256(file.chunks.tokens.tobytes()).hexdigest()
        return _key("logits", tokens, options.logits.stat().st_size, options.chunks)
    assert report.text is not None
    base = "" if report.base is None else report.base.fingerprint
    return _key(base, report.text.sha256, options.n_ctx, options.chunks)


@contextmanager
def _base_logits(report: Report, options: ReportOptions, progress: Progress) -> Iterator[Path]:
    """Yield base logits: those given, or made in the temporary folder and removed."""
    if options.logits is not None and options.logits.exists():
        yield options.logits
        return
    assert options.base is not None
    assert report.base is not None
    with tempfile.TemporaryDirectory(prefix="quantkit-report-") as folder:
        path = options.logits or Path(folder) / "base.logits"
        _perplexity(options.base, report.base.name, options, progress, SaveLogits(path, "compact", top_k=4096))
        yield path


def _perplexity(
    path: Path, name: str, options: ReportOptions, progress: Progress, save: SaveLogits | None = None
) -> tuple[Estimate, int, int]:
    assert options.text is not None

    def told(now: PerplexityProgress) -> None:
        progress(f"{name}: perplexity", now.chunk, now.n_chunks)

    found = perplexity(
        path,
        read_text(options.text).removesuffix(b"\n"),
        n_ctx=options.n_ctx,
        n_batch=options.n_batch,
        chunks=options.chunks,
        save_logits=save,
        progress=told,
        **options.load,
    )
    return found.ppl, found.n_scored, found.n_chunks


def _with_perplexity(file: File, path: Path, options: ReportOptions, key: str, progress: Progress) -> File:
    ppl, scored, chunks = _perplexity(path, file.name, options, progress)
    quality = Quality(key, scored, options.n_ctx, chunks, _finite(ppl))
    return replace(file, quality=quality, notes=_notes(path, options))


def _with_divergence(
    file: File, path: Path, logits: Path, options: ReportOptions, key: str, progress: Progress
) -> File:
    def told(now: KldProgress) -> None:
        progress(f"{file.name}: divergence", now.chunk, now.n_chunks)

    quality = options.known.get(path)
    if quality is None:
        load = options.load
        quality = quality_of(kld(path, logits, chunks=options.chunks, n_batch=options.n_batch, progress=told, **load))
    return replace(file, quality=replace(quality, key=key), notes=_notes(path, options))


def quality_of(found: Kld) -> Quality:
    """Return what a report shows of a divergence; it has no key yet."""
    sums = found.sums
    estimates = (sums.nll.ppl, sums.nll_base.ppl, sums.ratio, sums.kld.mean)
    ppl, ppl_base, ratio, mean = map(_finite, estimates)
    return Quality(
        "",
        sums.n,
        found.n_ctx,
        found.n_chunks,
        ppl,
        ppl_base,
        ratio,
        mean,
        found.bound,
        _finite(sums.same_top_p),
        _finite(sums.rms_p_diff),
        _quantiles(sums),
    )


def _finite(e: Estimate) -> Estimate:
    """Return an estimate that JSON can hold: a perplexity beyond all bounds is the largest number."""
    return Estimate(*(float(np.nan_to_num(x, posinf=1e300)) for x in e))


def _quantiles(sums: KldSums) -> tuple[Quantile, ...]:
    """Return what shares of the tokens exceed; shares of fewer than ten tokens are left out."""
    values = np.concatenate(sums.klds)
    shares = [s for s in SHARES if s * values.size >= 10]
    found = np.quantile(values, [1 - s for s in shares])
    return tuple(Quantile(s, max(0.0, float(v))) for s, v in zip(shares, found, strict=True))


def _notes(path: Path, options: ReportOptions) -> tuple[str, ...]:
    """Return the warning that the text was calibrated on, if the file tells so."""
    if options.text is None:
        return ()
    with open_gguf(path) as file:
        try:
            warning = calibrated_on(path, file.fields, read_text(options.text))
        except FormatError as e:
            warning = e.message
    return () if warning is None else (printable(warning.removeprefix("warning: ")),)


# ---------------------------------------------------------------- errors of matrices, speed


def _with_errors(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: Progress
) -> Iterator[tuple[int, File]]:
    if options.base is None or report.base is None or not options.errors:
        return
    weights = "" if options.imatrix is None else hashlib.sha256(options.imatrix.read_bytes()).hexdigest()
    key = _key(report.base.fingerprint, weights)
    for i, file in enumerate(report.files):
        if file.errors_key == key:
            continue

        def told(done: int, todo: int, name: str = file.name) -> None:
            progress(f"{name}: errors of weights", done, todo)

        load = options.load.get("threads")
        found = compare(
            options.base, paths[i], metadata=False, imatrix=options.imatrix, threads=load, progress=told
        ).tensors
        errors = {printable(t.name): (t.same, t.error) for t in found or ()}
        matrices = []
        for matrix in file.matrices:
            same, error = errors.get(matrix.name, (False, None))
            if error is None:
                matrices.append(replace(matrix, error=0.0 if same else None, weighted=False))
                continue
            weighted = error.weighted_relative
            value = error.relative if weighted is None else weighted
            matrices.append(replace(matrix, error=_or_none(value), weighted=weighted is not None))
        yield i, replace(file, matrices=tuple(matrices), errors_key=key)


def _or_none(x: float) -> float | None:
    return x if np.isfinite(x) else None


def _with_speeds(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: Progress
) -> Iterator[tuple[int, File]]:
    if not options.bench:
        return
    prompt, generated, times = options.bench
    tests = [Test(prompt, 0), Test(0, generated)]
    setting = _setting(options)
    for i, file in enumerate(report.files):
        machine = f"{cpu_name()}, {setting.threads or 'all'} threads"
        if [(s.test, s.machine) for s in file.speeds] == [(str(test), machine) for test in tests]:
            continue
        progress(f"{file.name}: speed", 0, 0)
        results = bench(paths[i], tests, [setting], repetitions=times)
        speeds = (Speed(str(r.test), Estimate(r.avg_ts, r.stddev_ts), machine) for r in results)
        yield i, replace(file, speeds=tuple(speeds))


def _setting(options: ReportOptions) -> Setting:
    load = options.load
    known: Iterable[str] = ("n_ubatch", "kv_type", "mmap", "max_ram", "max_vram", "cublas", "placement")
    given = {name: load[name] for name in known if load.get(name) is not None}  # type: ignore[literal-required]
    return Setting(threads=load.get("threads") or 0, n_batch=options.n_batch, **given)
