"""Measurement of the numbers of a report; those of an earlier run are reused if their files are unchanged.

Each file is compared with the base on a text (``evaluate``), matrix by matrix (``compare``), and timed (``bench``).
The numbers are written after each of these steps, so that an interrupted run resumes there.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from quantkit.activations import ACTIVATIONS, EXACT, RUNTIME
from quantkit.arguments import Options, option
from quantkit.bench import BenchProgress, Setting, Test, bench, cpu_name
from quantkit.calibration import calibration_warning, sketch_of
from quantkit.compare import compare
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate import Estimate, Kld, KldProgress, KldSums, PerplexityProgress, SaveLogits, kld, perplexity
from quantkit.evaluate.passes import LoadOptions, choose_activations
from quantkit.formats.gguf import open_gguf, open_model
from quantkit.formats.gguf.mmproj import encoder_names, is_mmproj, no_language_model
from quantkit.formats.gguf.rules import n_dims
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.outputs import read_text
from quantkit.imatrix import coverage
from quantkit.inspect import EMBEDDING_LENGTH, TEXT_EMBEDDING_LENGTH, Inspection, inspect
from quantkit.names import file_name, printable, shorten, tensor_class
from quantkit.pipeline.content import FileRecord, content_digest
from quantkit.pipeline.exactness import exact_weights
from quantkit.pipeline.facts import layer_of
from quantkit.progress import Progress
from quantkit.report.by_text import list_report_texts, measure_texts
from quantkit.report.data import (
    Base,
    Costs,
    Coverage,
    File,
    GroupCost,
    Matrix,
    Mmproj,
    ModelSummary,
    Quality,
    Quantile,
    Report,
    Speed,
    StepReport,
    Support,
    TensorCoverage,
    Text,
    digest_of,
)
from quantkit.report.provenance import provenance_rows, rebuild_command
from quantkit.report.scores import measure_scores
from quantkit.sensitivity import read_sensitivity
from quantkit.sensitivity.file import LAYER
from quantkit.version import __version__

#: Shares of the tokens for each of which the divergence that it exceeds is reported.
SHARES = (0.9, 0.75, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: Keys general.* for model cards.
_CARD_KEYS = (
    "license",
    "license.name",
    "license.link",
    "languages",
    "tags",
    "base_model.0.repo_url",
    "base_model.0.name",
    "base_model.0.organization",
    "source.repo_url",
    "repo_url",
    "organization",
    "size_label",
)

#: Headings of --help.
MEASUREMENTS, CONTENT = "Measurements", "Content"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Measurements of a report; names as on the command line. Each option is declared here alone.

    ``known``: results of earlier measurements against ``logits``, by file. ``bench``: tokens of a prompt and of a
    generation to time, and repetitions; () for none. ``load``: how models are loaded.
    """

    base: Path | None = option(
        None, "Unquantized model (BF16), to measure divergence and errors.", MEASUREMENTS, kind="model"
    )
    text: Path | None = option(
        None, "Held-out text; without --base, for perplexity only.", MEASUREMENTS, kind="text", flags=("-f", "--file")
    )
    texts: tuple[Path, ...] = option(
        (),
        "Also measure the divergence on each of these texts: files and directories (quantkit texts). Repeatable.",
        MEASUREMENTS,
        kind="texts",
        metavar="FILE|DIR",
    )
    logits: Path | None = option(
        None, "Base logits; computed and written if missing.", MEASUREMENTS, kind="file", metavar="FILE"
    )
    known: Mapping[Path, Quality] = field(default_factory=dict)
    n_ctx: int = option(512, "Tokens per chunk.", MEASUREMENTS, least=4, flags=("-c", "--ctx-size"))
    chunks: int | None = option(None, "Number of chunks; -1 (default): all.", MEASUREMENTS, kind="chunks")
    activations: str | None = option(
        None,
        "Activations: exact (f32, times decoded weights: figures of the weights alone) or runtime (rounded as by "
        "llama.cpp).  [default: exact; on GPUs runtime]",
        MEASUREMENTS,
        choices=ACTIVATIONS,
    )
    n_batch: int = 2048
    errors: bool = option(
        True, "Compare every matrix with that of the base (default).", MEASUREMENTS, flags=("--errors/--no-errors",)
    )
    bench: tuple[int, int, int] | tuple[()] = ()
    score: tuple[Path, ...] = option(
        (),
        "Score multiple-choice tasks: HellaSwag, WinoGrande, ARC, MMLU. Repeatable.",
        MEASUREMENTS,
        kind="text",
        metavar="FILE",
    )
    score_tasks: int | None = option(
        None,
        "Number of tasks of each file; 0: all.  [default: 400 of HellaSwag, all others]",
        MEASUREMENTS,
        least=0,
        metavar="N",
    )
    imatrix: Path | None = option(
        None, "Show its coverage, and use it to weight errors.", CONTENT, kind="local imatrix", metavar="FILE"
    )
    sensitivity: Path | None = option(None, "Show the cost of each group in its type.", CONTENT, metavar="S.json")
    mmproj: tuple[Path, ...] = option(
        (),
        "List the model's mmproj file, its vision and audio encoders; not measured. Repeatable.",
        CONTENT,
        kind="model",
    )
    title: str = option("", "Title.  [default: the model's name]", CONTENT, metavar="TEXT")
    base_model: str = option(
        "", "Model card: the base model on the hub.  [default: from the metadata]", CONTENT, metavar="ORG/NAME"
    )
    license: str = option(
        "", "Model card: license of the base model.  [default: from the metadata]", CONTENT, metavar="ID"
    )
    load: LoadOptions = field(default_factory=LoadOptions)


def measure_report(
    paths: Sequence[Path],
    options: ReportOptions,
    previous: Report | None,
    save: Callable[[Report], None],
    progress: StepReport,
) -> Report:
    """Return the numbers of files; ``save`` is called with the numbers so far after each step.

    Raises:
        QuantkitError: a file cannot be read, belongs to another model, or options contradict each other.
    """
    _check_options(options)
    inspections = _inspect_models([*paths, *options.mmproj])
    encoders = [inspection for inspection in inspections if _is_encoders(inspection)]
    inspections = [inspection for inspection in inspections if inspection not in encoders]
    _check_encoders(encoders, inspections, options)
    paths = [inspection.path for inspection in inspections]
    names = [inspection.path.name for inspection in (*inspections, *encoders)]
    if duplicate := next((n for n in names if names.count(n) > 1), None):
        raise RecipeError(
            f"two files are named {duplicate}, and a report shows names without folders: rename one", "QK-E203"
        )
    base = inspect(options.base) if options.base is not None else None
    if base is not None and _is_encoders(base):
        raise no_language_model(base.path)
    for inspection in inspections:
        _check_architecture(inspections[0] if base is None else base, inspection)
    files = [_file(inspection, _file_record(inspection, options, previous), previous) for inspection in inspections]
    # Without a text, the qualities, base and text of an earlier run are kept.
    reused = previous if options.text is None and options.logits is None else None
    base_record = None if base is None else _base(base, _file_record(base, options, previous), previous)
    imatrix = None if previous is None else previous.imatrix
    if options.imatrix is not None:
        imatrix = _coverage(options.imatrix, inspections[0].path)
    sensitivity = None if previous is None else previous.sensitivity
    if options.sensitivity is not None:
        sensitivity = _costs(options.sensitivity)
    report = Report(
        title=options.title or f"{inspections[0].name or inspections[0].path.stem}: GGUF quantizations",
        made=datetime.now(UTC).strftime("%Y-%m-%d"),
        version=__version__,
        model=_model_summary(inspections[0] if base is None else base),
        files=tuple(files),
        base=reused.base if reused is not None and base is None else base_record,
        text=_text(options.text) if reused is None else reused.text,
        imatrix=imatrix,
        sensitivity=sensitivity,
        mmproj=tuple(map(_mmproj, encoders)),
    )
    save(report)
    for step in (_measure_qualities, _measure_by_text, _measure_errors, _measure_speeds):
        for i, file in step(report, paths, options, progress):
            files[i] = file
            report = replace(report, files=tuple(files))
            save(report)
    load = _load_options(options) if options.score else options.load
    scoring = measure_scores(report, paths, options.base, options.score, options.score_tasks, load, progress)
    for report in scoring:  # noqa: B020 - each includes the one before
        save(report)
    return report


def _inspect_models(paths: Iterable[Path]) -> list[Inspection]:
    """Return the contents of files; shards of one model, which a pattern of names matches, count once."""
    inspections: dict[Path, Inspection] = {}
    for inspection in map(inspect, paths):
        first = inspection.shards[0].path
        inspections.setdefault(first, replace(inspection, path=first))
    return list(inspections.values())


def _is_encoders(inspection: Inspection) -> bool:
    return is_mmproj({"general.architecture": inspection.architecture, "general.type": inspection.kind})


def _check_encoders(encoders: Sequence[Inspection], models: Sequence[Inspection], options: ReportOptions) -> None:
    """Raise an error for files of --mmproj that are none, without a model, or of a model of another width."""
    mmproj = {path.resolve() for path in options.mmproj}
    for model in models:
        if model.path.resolve() in mmproj:
            raise RecipeError(f"--mmproj {model.path}: not an mmproj file: give it as a file of the report", "QK-E207")
    if not models:
        raise no_language_model(encoders[0].path)
    width = _fact(models[0], EMBEDDING_LENGTH)
    for inspection in encoders:
        fits = _fact(inspection, TEXT_EMBEDDING_LENGTH)
        if width is not None and fits is not None and fits != width:
            raise QuantkitError(
                f"{inspection.path}: its encoders fit text models of embedding length {fits}, and that of "
                f"{models[0].path} is {width}",
                "QK-E207",
            )


def _fact(inspection: Inspection, label: str) -> object:
    """Return a fact; None if the file does not state it."""
    return next((fact.value for fact in inspection.facts if fact.label == label), None)


def _check_options(options: ReportOptions) -> None:
    if options.logits is not None and not options.logits.exists() and None in (options.base, options.text):
        raise RecipeError(
            f"{options.logits} does not exist: it is computed from --base and a text (-f): give both", "QK-E202"
        )
    has_text = options.texts or options.text is not None or options.logits is not None
    if options.base is not None and not has_text and not options.errors:
        raise RecipeError("--base is only used with a text: also give -f or --texts", "QK-E202")


def _check_architecture(a: Inspection, b: Inspection) -> None:
    if a.architecture != b.architecture:
        raise QuantkitError(
            f"{b.path} is a model of {printable(b.architecture)}, {a.path} one of {printable(a.architecture)}:"
            " a report is about one model",
            "QK-E207",
        )


def _fingerprint(path: Path) -> str:
    with open_model(path) as file:
        return file.fingerprint()


# --- from headers ---


def _model_summary(inspection: Inspection) -> ModelSummary:
    keys = {f"general.{key}" for key in _CARD_KEYS}
    facts = [(fact.label, printable(fact.value)) for fact in inspection.facts if not fact.counts]
    card = [(f.key, _join_values(f.value)) for f in inspection.fields if f.key in keys]
    name = shorten(printable(inspection.name or inspection.path.stem), 200)
    return ModelSummary(
        name, inspection.architecture, inspection.total.values, inspection.active_values, tuple(facts), tuple(card)
    )


def _join_values(value: object) -> str:
    return ",".join(map(printable, value)) if isinstance(value, (list, tuple)) else printable(value)


def _file_record(inspection: Inspection, options: ReportOptions, previous: Report | None) -> FileRecord | None:
    """Return the record of a file by which its measurements stay valid; None if there are none."""
    measures = options.bench or options.score or options.texts
    if previous is None and not measures and options.base is options.text is options.logits is None:
        return None
    records = [] if previous is None else [f.content for f in (*previous.files, previous.base) if f is not None]
    return FileRecord.read([shard.path for shard in inspection.shards], records)


def _base(inspection: Inspection, content: FileRecord | None, previous: Report | None) -> Base:
    types = tuple(g.name for g in inspection.by_type)
    old = None if previous is None else previous.base
    scores = old.scores if old is not None and _has_same_content(old.content, content) else ()
    name = printable(inspection.path.name)
    return Base(name, _fingerprint(inspection.path), inspection.file_bytes, types, scores, content)


def _text(path: Path | None) -> Text | None:
    if path is None:
        return None
    raw = read_text(path)
    return Text(printable(path.name), hashlib.sha256(raw).hexdigest(), len(raw))


def _file(inspection: Inspection, content: FileRecord | None, previous: Report | None) -> File:
    exact = exact_weights(dict(inspection.provenance))
    matrices = (
        replace(_matrix(t.name, t.type.name, t.shape, t.nbytes), exact=exact.get(t.name))
        for t in inspection.tensors
        if n_dims(t.shape) > 1
    )
    file = File(
        name=printable(inspection.path.name),
        fingerprint=_fingerprint(inspection.path),
        shards=len(inspection.shards),
        nbytes=inspection.file_bytes,
        tensor_bytes=inspection.total.nbytes,
        values=inspection.total.values,
        preset=inspection.file_type_name.partition(" or ")[0],
        by_type=tuple((g.name, g.tensors, g.nbytes) for g in inspection.by_type),
        matrices=tuple(matrices),
        support=tuple(Support(r.name, r.loads, str(r)) for r in inspection.runtimes),
        provenance=provenance_rows(inspection),
        command=rebuild_command(inspection),
        content=content,
    )
    old_files = () if previous is None else previous.files
    old = next((f for f in old_files if _has_same_content(f.content, content)), None)
    if old is None:
        return file
    old_matrices = {m.name: m for m in old.matrices}
    return replace(
        file,
        matrices=tuple(old_matrices.get(m.name, m) for m in file.matrices),
        errors_key=old.errors_key,
        quality=old.quality,
        speeds=old.speeds,
        scores=old.scores,
        by_text=old.by_text,
        texts_key=old.texts_key,
        notes=old.notes,
    )


def _mmproj(inspection: Inspection) -> Mmproj:
    facts = tuple((fact.label, printable(fact.value)) for fact in inspection.facts)
    by_type = tuple((g.name, g.tensors, g.nbytes) for g in inspection.by_type)
    encoders = encoder_names({field.key: field.value for field in inspection.fields})
    return Mmproj(printable(inspection.path.name), inspection.file_bytes, encoders, by_type, facts)


def _has_same_content(a: FileRecord | None, b: FileRecord | None) -> bool:
    return a is not None and b is not None and a.digest == b.digest


def _matrix(name: str, type_name: str, shape: Sequence[int], nbytes: int) -> Matrix:
    layer = layer_of(name)
    values = int(np.prod([int(n) for n in shape], dtype=object))
    label = printable(name)
    return Matrix(label, printable(tensor_class(name)), layer if layer >= 0 else None, type_name, values, nbytes)


def _coverage(path: Path, model: Path) -> Coverage:
    imatrix = read_imatrix(path)
    with open_gguf(model) as file:
        arch = str(file.get("general.architecture", ""))
        result = coverage(imatrix, file.tensors.values(), arch=arch)
    sketch = sketch_of(imatrix)
    tensors = []
    for t in result.tensors:
        if t.expected is False:
            continue
        has_counts = t.counts.size > 0 and not t.estimated
        least, median = (int(t.counts.min()), float(np.median(t.counts))) if has_counts else (None, None)
        layer = layer_of(t.name) if layer_of(t.name) >= 0 else None
        present = t.entry is not None
        tensors.append(
            TensorCoverage(printable(t.name), printable(t.kind), layer, present, t.experts, t.never, least, median)
        )
    texts = tuple(file_name(printable(name)) for name in imatrix.datasets)
    hashes = () if sketch is None else sketch.sha256
    return Coverage(printable(path.name), texts, hashes, result.share, result.hardly, tuple(tensors))


def _costs(path: Path) -> Costs:
    sensitivity = read_sensitivity(path)
    groups = {g.name: g for g in sensitivity.groups}
    costs = []
    for cost in sensitivity.costs:
        group = groups[cost.group]
        kld = cost.kld if cost.kld is not None else cost.proxies.get(LAYER)
        if kld is not None and not cost.feedback:
            names = tuple(map(printable, group.tensors))
            fields = printable(group.name), printable(group.kind), group.layer, names
            costs.append(GroupCost(*fields, cost.type.name, float(kld), cost.kld_error))
    text = ", ".join(printable(f) for f in sensitivity.text.get("files", ()))
    return Costs(printable(path.name), shorten(text, 200), tuple(costs))


# --- quality ---


def _measure_qualities(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: StepReport
) -> Iterator[tuple[int, File]]:
    if options.text is None and options.logits is None:
        return
    key = _quality_key(report, options)
    pending = [i for i, f in enumerate(report.files) if f.quality is None or f.quality.key != key]
    if not pending:
        return
    if options.base is None and options.logits is None:
        for i in pending:
            yield i, _with_perplexity(report.files[i], paths[i], options, key, progress)
        return
    with _base_logits(report, options, progress) as logits:
        for i in pending:
            yield i, _with_divergence(report.files[i], paths[i], logits, options, key, progress)


def _quality_key(report: Report, options: ReportOptions) -> str:
    mode = _load_options(options)["activations"]
    activations = () if mode == RUNTIME else (mode,)  # a key without a mode is one of the runtime's
    if options.logits is not None and options.logits.exists():
        return digest_of("logits", content_digest([options.logits]), options.chunks, *activations)
    assert report.text is not None
    return digest_of(report.base_digest, report.text.sha256, options.n_ctx, options.chunks, *activations)


def _load_options(options: ReportOptions) -> LoadOptions:
    """Return the options of models that are measured; on GPUs, activations are the runtime's if none are chosen."""
    mode: LoadOptions = {} if options.activations is None else {"activations": options.activations}
    return choose_activations({**options.load, **mode}, EXACT)[0]


@contextmanager
def _base_logits(report: Report, options: ReportOptions, progress: StepReport) -> Iterator[Path]:
    """Yield a file of base logits: the one given, else a new one, which is removed unless it has a name."""
    if options.logits is not None and options.logits.exists():
        yield options.logits
        return
    assert options.base is not None
    assert report.base is not None
    with tempfile.TemporaryDirectory(prefix="quantkit-report-") as folder:
        path = options.logits or Path(folder) / "base.logits"
        _measure_perplexity(options.base, report.base.name, options, progress, SaveLogits(path, "compact", top_k=4096))
        yield path


def _measure_perplexity(
    path: Path, name: str, options: ReportOptions, progress: StepReport, save: SaveLogits | None = None
) -> tuple[Estimate, int, int]:
    assert options.text is not None

    def on_chunk(now: PerplexityProgress) -> None:
        progress(f"{name}: perplexity", now.current, now.total)

    result = perplexity(
        path,
        read_text(options.text).removesuffix(b"\n"),
        n_ctx=options.n_ctx,
        n_batch=options.n_batch,
        chunks=options.chunks,
        save_logits=save,
        progress=on_chunk,
        **_load_options(options),
    )
    return result.ppl, result.n_scored, result.n_chunks


def _measure_by_text(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: StepReport
) -> Iterator[tuple[int, File]]:
    settings = {"n_ctx": options.n_ctx, "n_batch": options.n_batch, "chunks": options.chunks}
    load = _load_options(options)
    for i, file in measure_texts(report, paths, options.base, options.texts, load, progress, **settings):
        yield i, replace(file, notes=tuple(dict.fromkeys((*file.notes, *_notes(paths[i], options)))))


def _with_perplexity(file: File, path: Path, options: ReportOptions, key: str, progress: StepReport) -> File:
    ppl, scored, chunks = _measure_perplexity(path, file.name, options, progress)
    activations = str(_load_options(options)["activations"])
    quality = Quality(key, scored, options.n_ctx, chunks, _finite(ppl), activations=activations)
    return replace(file, quality=quality, notes=_notes(path, options))


def _with_divergence(
    file: File, path: Path, logits: Path, options: ReportOptions, key: str, progress: StepReport
) -> File:
    def on_chunk(now: KldProgress) -> None:
        progress(f"{file.name}: divergence", now.current, now.total)

    quality = options.known.get(path)
    if quality is None:
        load = _load_options(options)
        quality = quality_of(
            kld(path, logits, chunks=options.chunks, n_batch=options.n_batch, progress=on_chunk, **load)
        )
    return replace(file, quality=replace(quality, key=key), notes=_notes(path, options))


def quality_of(divergence: Kld) -> Quality:
    """Return the quality of a result of ``kld``; its key is empty."""
    sums = divergence.sums
    estimates = (sums.nll.ppl, sums.nll_base.ppl, sums.ratio, sums.kld.mean)
    ppl, ppl_base, ratio, mean = map(_finite, estimates)
    return Quality(
        "",
        sums.n,
        divergence.n_ctx,
        divergence.n_chunks,
        ppl,
        ppl_base,
        ratio,
        mean,
        divergence.bound,
        _finite(sums.same_top_p),
        _finite(sums.rms_p_diff),
        _quantiles(sums),
        divergence.activations,
    )


def _finite(e: Estimate) -> Estimate:
    """Return an estimate that JSON can represent: infinity becomes 1e300."""
    return Estimate(*(float(np.nan_to_num(x, posinf=1e300)) for x in e))


def _quantiles(sums: KldSums) -> tuple[Quantile, ...]:
    """Return the divergences that shares of the tokens exceed, without shares of fewer than ten tokens."""
    values = np.concatenate(sums.klds)
    shares = [s for s in SHARES if s * values.size >= 10]
    quantiles = np.quantile(values, [1 - s for s in shares])
    return tuple(Quantile(s, max(0.0, float(v))) for s, v in zip(shares, quantiles, strict=True))


def _notes(path: Path, options: ReportOptions) -> tuple[str, ...]:
    """Return the warnings that a file was calibrated on a text, if its metadata show that; names if there are several.

    The text of the quality is first, without a name.
    """
    texts = [("", path) for path in (options.text,) if path is not None]
    texts += [(f"{file_name(str(path))}: ", path) for path in list_report_texts(options.texts)]
    notes = []
    with open_gguf(path) as file:
        for name, text in texts:
            try:
                warning = calibration_warning(path, file.fields, read_text(text))
            except FormatError as e:
                warning = e.message
            notes += [] if warning is None else [printable(name + warning.removeprefix("warning: "))]
    return tuple(dict.fromkeys(notes))


# --- errors of matrices, speed ---


def _measure_errors(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: StepReport
) -> Iterator[tuple[int, File]]:
    if options.base is None or report.base is None or not options.errors:
        return
    weights = "" if options.imatrix is None else hashlib.sha256(options.imatrix.read_bytes()).hexdigest()
    key = digest_of(report.base_digest, weights)
    for i, file in enumerate(report.files):
        if file.errors_key == key:
            continue

        def on_progress(now: Progress, name: str = file.name) -> None:
            progress(f"{name}: errors of weights", now.current, now.total)

        threads = options.load.get("threads")
        tensors = compare(
            options.base, paths[i], metadata=False, imatrix=options.imatrix, threads=threads, progress=on_progress
        ).tensors
        errors = {printable(t.name): (t.identical, t.error) for t in tensors or ()}
        matrices = []
        for matrix in file.matrices:
            identical, error = errors.get(matrix.name, (False, None))
            if error is None:
                matrices.append(replace(matrix, error=0.0 if identical else None, weighted=False))
                continue
            weighted = error.weighted_relative
            value = error.relative if weighted is None else weighted
            matrices.append(replace(matrix, error=_finite_or_none(value), weighted=weighted is not None))
        yield i, replace(file, matrices=tuple(matrices), errors_key=key)


def _finite_or_none(x: float) -> float | None:
    return x if np.isfinite(x) else None


def _measure_speeds(
    report: Report, paths: Sequence[Path], options: ReportOptions, progress: StepReport
) -> Iterator[tuple[int, File]]:
    if not options.bench:
        return
    prompt, generation, repetitions = options.bench
    tests = [Test(prompt, 0), Test(0, generation)]
    setting = _bench_setting(options)
    for i, file in enumerate(report.files):
        machine = f"{cpu_name()}, {setting.threads or 'all'} threads"
        if [(s.test, s.machine) for s in file.speeds] == [(str(test), machine) for test in tests]:
            continue
        progress(f"{file.name}: speed", 0, 0)

        def show(now: BenchProgress, text: str = f"{file.name}: speed") -> None:
            progress(text, now.current, now.total)

        results = bench(paths[i], tests, [setting], repetitions=repetitions, progress=show)
        speeds = (Speed(str(r.test), Estimate(r.avg_ts, r.stddev_ts), machine) for r in results)
        yield i, replace(file, speeds=tuple(speeds))


def _bench_setting(options: ReportOptions) -> Setting:
    load = options.load
    names: Iterable[str] = ("n_ubatch", "kv_type", "mmap", "max_ram", "max_vram", "cublas", "placement")
    values = {name: load[name] for name in names if load.get(name) is not None}  # type: ignore[literal-required]
    return Setting(threads=load.get("threads") or 0, n_batch=options.n_batch, **values)
