"""``sensitivity``: measure the divergence caused by quantizing each group of tensors alone, in each of several types.

The run goes layer by layer. The base model runs a layer for a batch of windows; for each pair of a group and a type
only the operations that depend on the group run again, then the later layers. So memory holds the model once, and the
encoded tensors of one layer. The base model's activations at the start of a layer are in files beside the output.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import RecipeError, ResourceError
from quantkit.evaluate.likelihood import split_chunks
from quantkit.evaluate.passes import bos_of, note_calibration, note_context, text_tokens
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.outputs import Output, atomic_write, check_apart, read_text, sibling_path
from quantkit.formats.remote import URL, locate
from quantkit.kernels.first_run import working_seconds
from quantkit.kernels.levels import all_levels
from quantkit.model.batch import Batch
from quantkit.model.engine import Model, check_next_token, load
from quantkit.model.selection import without_selection
from quantkit.names import span
from quantkit.options.sensitivity import ALL_FULL_TYPES, FULL_RUNS, TYPES, SensitivityOptions
from quantkit.pipeline.cache.store import open_store
from quantkit.pipeline.content import FileRecord
from quantkit.pipeline.feedback import CovarianceFile
from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.run import DEFAULT_MAX_RAM
from quantkit.progress import Progress, ProgressCallback
from quantkit.sensitivity.encode import EncodedPair, Encoder, Encoding, Pair, groups_of, measurable_types, pairs_of
from quantkit.sensitivity.experts import routings
from quantkit.sensitivity.file import Cost, Sensitivity, read_sensitivity
from quantkit.sensitivity.journal import Journal, Key
from quantkit.sensitivity.layer_errors import relative_error, with_layer_errors
from quantkit.sensitivity.proxies import probes_of, rank_correlations, select_evenly, with_proxies
from quantkit.sensitivity.scores import Base, Sums
from quantkit.sensitivity.uniform_models import ActivationStore, UniformModel, groups_by_type, settings_row
from quantkit.sensitivity.variants import (
    Layer,
    OverlaidFile,
    Runner,
    Values,
    first_layer,
    has_visible_error,
    layers_of,
    variant_of,
    with_leaves,
)
from quantkit.types import TensorType, type_by_name
from quantkit.version import __version__

I32 = npt.NDArray[np.int32]

#: Journal key of the base model's likelihood.
BASE: Key = ("", "", "base")
#: Memory for the logits of a batch, in bytes: the base's logits and probabilities.
_LOGITS = 256 << 20


@checked
def sensitivity(
    model: str | Path,
    out: str | Path,
    files: Sequence[str | Path] = (),
    *,
    tokens: npt.ArrayLike | None = None,
    options: SensitivityOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Sensitivity:
    """Measure the divergence on held-out text that quantizing each group alone causes, and write it to ``out``.

    Args:
        model: a GGUF file of full precision. files: texts, or ``tokens``, int32 [n].
        out: the file to write; ``read_sensitivity`` reads it. ``settings["notes"]`` are notes for the user.

    Raises:
        RecipeError: contradictory options, or a type that can be measured for no group.
        ResourceError: the output exists, another run writes it, or an interrupted run is not resumed.
        QuantkitError: too little text; errors of ``quantize`` and ``load``.
    """
    options = options or SensitivityOptions()
    model = locate(model)
    out = locate(out)
    if isinstance(model, URL) or str(model).startswith(("http://", "https://", "s3://")):
        raise ResourceError(f"{model}: sensitivity runs the model, which needs a local file: copy it first", "QK-E412")
    if (tokens is None) == (not files):
        raise RecipeError("nothing to measure on: give texts (-f), or tokens", "QK-E202")
    check_apart([out, sibling_path(out, ".journal")], [model, *files, options.imatrix, options.feedback])
    with ExitStack() as stack:
        stack.enter_context(Output(out, overwrite=options.overwrite or options.resume))
        run = _Run(model, out, files, tokens, options, progress, stack)
        result = run.read_finished()
        return result if result is not None else run.run()


class _Run:
    """One run: its inputs, model and settings."""

    def __init__(
        self,
        model: Path,
        out: Path,
        files: Sequence[str | Path],
        tokens: npt.ArrayLike | None,
        options: SensitivityOptions,
        progress: ProgressCallback | None,
        stack: ExitStack,
    ) -> None:
        self.start_seconds = working_seconds()
        self.model_path = model
        self.out = out
        self.files = files
        self.options = options
        self.progress = progress
        self.threads = options.threads or available_cpus()
        if options.full_runs is not None and options.proxies_only:
            raise RecipeError("--proxies-only runs one type of each group: omit it or --full-runs", "QK-E201")
        self.encoding = Encoding(options.imatrix, options.feedback, options.allow_requantize)
        names = options.types or [n for n in TYPES if options.imatrix or type_by_name(n).imatrix != "required"]
        self.types = measurable_types(names)
        #: Types of each group that run to the end of the model, None for all.
        self.full_runs = full_runs_of(options.full_runs, len(self.types), proxies_only=options.proxies_only)
        self.groups = groups_of(model, self.encoding, options.groups)
        imatrix = None if options.imatrix is None else read_imatrix(options.imatrix)
        self.routings = routings(self.groups, imatrix)
        self.pairs, left_out = pairs_of(self.groups, self.types, self.encoding)
        self.notes = [f"skipped {span(names, 'groups')}: {reason}" for reason, names in left_out.items()]
        #: Notes on this run alone. They are not written, so that a resumed run produces the same file.
        self.run_notes: list[str] = []
        self.model: Model = stack.enter_context(
            load(
                model,
                threads=self.threads,
                n_ctx=options.n_ctx,
                kv_type=options.kv_type,
                activations=options.activations,
                max_ram=options.max_ram,
                rewrite=partial(without_selection, n_ctx=options.n_ctx),
                wrap=OverlaidFile,
            )
        )
        check_next_token(self.model)
        ids = self._tokens(tokens)
        self.windows = split_chunks(ids, options.n_ctx, options.chunks)
        note_context(self.model, options.n_ctx, self.notes)
        note_calibration(self.model, None, ids, self.notes)
        self.bos = bos_of(self.model, self.notes)
        self.first = options.n_ctx // 2
        self.rows = options.n_ctx - 1 - self.first
        fits = _LOGITS // (8 * self.rows * self.model.n_vocab)
        self.batch_windows = max(1, min(len(self.windows), options.n_batch // options.n_ctx, fits))
        #: Files that the measurements depend on.
        self.inputs: list[Path] = list(self.model.source.inputs)
        if options.feedback is not None:
            self.inputs.append(CovarianceFile(options.feedback).path)
        self.identity = self._identity()
        self.pool = stack.enter_context(ThreadPoolExecutor(self.threads))

    def _tokens(self, tokens: npt.ArrayLike | None) -> I32:
        if tokens is not None:
            return text_tokens(self.model, None, tokens)
        parts = [text_tokens(self.model, read_text(f).removesuffix(b"\n"), None) for f in self.files]
        return np.concatenate(parts)

    def _identity(self) -> str:
        """Return a SHA-256 of everything that decides a measurement, except ``inputs``."""
        o = self.options
        imatrix = None if o.imatrix is None else read_imatrix(o.imatrix).sha256
        settings = (__version__, imatrix, o.feedback is not None, o.groups, o.kv_type, o.activations, self.bos)
        shape = (self.windows.shape, self.batch_windows, self.first)
        return hashlib.sha256(repr((settings, shape)).encode() + self.windows.tobytes()).hexdigest()

    def read_finished(self) -> Sensitivity | None:
        """Return the output of an earlier, finished run, or None. Raises ResourceError for any other file."""
        if not self.out.exists() or self.options.overwrite:
            return None
        result = read_sensitivity(self.out)
        is_same = {t.name for t in self.types} <= set(result.settings.get("types", ()))
        completeness = _completeness(result.settings.get("full_runs"), bool(result.settings.get("proxies_only")))
        is_same = is_same and completeness >= _completeness(self.full_runs, self.options.proxies_only)
        is_same = is_same and result.settings.get("identity") == self.identity
        if is_same and result.settings.get("inputs") == FileRecord.read(self.inputs).digest:
            return result
        raise ResourceError(
            f"{self.out} exists and is not a result of this run: use --overwrite to replace it", "QK-E402"
        )

    # ------------------------------------------------------------ the run

    def run(self) -> Sensitivity:
        """Measure all pairs and write the output."""
        o = self.options
        journal = Journal(self.out, self.identity, self.inputs, resume=o.resume, overwrite=o.overwrite)
        folder = sibling_path(self.out, ".activations")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            result = self._measure(journal, folder)
            with atomic_write(self.out) as part:
                part.write_text(result.to_json())
        except BaseException:
            journal.close(remove=False)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        journal.close(remove=True)
        return replace(result, settings={**result.settings, "notes": [*self.notes, *self.run_notes]})

    def _measure(self, journal: Journal, folder: Path) -> Sensitivity:
        o = self.options
        layers = layers_of(self.model.unfused)
        layer_of = {g.name: first_layer(layers, self.model.unfused, g.tensors.keys()) for g in self.groups}
        if unread := [name for name, layer in layer_of.items() if layer is None]:
            self.notes.append(f"skipped {span(unread, 'groups')}: not used when the model runs")
        pairs = [p for p in self.pairs if layer_of[p.group.name] is not None]
        if o.feedback is not None:
            with_feedback = [p._replace(feedback=True) for p in pairs if p.type.name in all_levels()]
        store = None if o.cache is None else open_store(o.cache, size=o.cache_size)
        candidates = [*pairs, *(with_feedback if o.feedback is not None else ())]
        encoder = Encoder(self.model_path, candidates, self.encoding, self.threads, o.max_ram or DEFAULT_MAX_RAM, store)
        candidates = [p for p in candidates if not p.feedback or encoder.has_feedback(p)]
        self.notes += encoder.notes
        selected = set(candidates) if self.full_runs is None else select_evenly(candidates, self.full_runs)
        probes = probes_of([p for p in candidates if p in selected])
        if self.full_runs is not None and len(selected) < len(candidates):
            self.notes.append(
                f"{self.full_runs} types of each group run to the end of the model, the other types to the end of "
                f"their layer; use --full-runs -1 to run all to the end"
            )
        self._full_pairs = (
            probes if o.proxies_only else selected | self._pairs_without_layer_error(candidates, layer_of, layers)
        )
        measurement = _Measurement(self, journal, folder, encoder, layers)
        measurement.begin({n: [p for p in candidates if layer_of[p.group.name] == n] for n in range(len(layers))})
        try:
            measurement.run()
        except BaseException:
            encoder.drop()
            raise
        self.run_notes = encoder.close()
        return self._result(journal, candidates, probes, measurement)

    def _pairs_without_layer_error(
        self, pairs: Sequence[Pair], layer_of: Mapping[str, int | None], layers: Sequence[Layer]
    ) -> set[Pair]:
        """Return the pairs whose error is only visible in the logits."""
        graph, result = self.model.unfused, set[Pair]()
        for pair in pairs:
            number = layer_of[pair.group.name]
            if number is not None and not has_visible_error(graph, layers[number], pair.group.tensors.keys()):
                result.add(pair)
        return result

    def _result(
        self, journal: Journal, pairs: Sequence[Pair], probes: set[Pair], measurement: _Measurement
    ) -> Sensitivity:
        o = self.options
        sums = {p: ErrorSums(*journal.measurements[measurement.key(p, "errors")]) for p in pairs}
        ends = {p: error for p in pairs if (error := measurement.error_at_end(p)) is not None}
        measured_costs = {p: self._cost(p, measurement) for p in pairs}
        costs = with_layer_errors(with_proxies(measured_costs, sums, probes), ends)
        correlations = rank_correlations(costs, probes)
        order = {g.name: i for i, g in enumerate(self.groups)}
        types = {t: i for i, t in enumerate(self.types)}
        ordered = sorted(costs, key=lambda p: (order[p.group.name], types[p.type], p.feedback))
        names = {p.group.name for p in pairs}
        source = self.model.source
        text = {
            "files": [Path(f).name for f in self.files],
            "sha256": [hashlib.sha256(read_text(f)).hexdigest() for f in self.files],
            "n_ctx": o.n_ctx,
            "chunks": len(self.windows),
            "scored": len(self.windows) * self.rows,
            "bos": self.bos,
        }
        settings: dict[str, Any] = {
            "version": __version__,
            "types": [t.name for t in self.types],
            "groups": o.groups,
            "imatrix": None if o.imatrix is None else o.imatrix.name,
            "feedback": None if o.feedback is None else o.feedback.name,
            "kv_type": o.kv_type,
            "activations": o.activations,
            "full_runs": self.full_runs,
            "proxies_only": o.proxies_only,
            "probes": {p.group.name: p.type.name for p in sorted(probes, key=lambda p: order[p.group.name])},
            "rank_correlation": correlations,
            "nll": measurement.nll(),
            "experts": {name: measurement.experts(name, pairs) for name in self.routings},
            "together": [
                settings_row(t, groups, measurement.total(measurement.uniform_key(t)))
                for t, groups in measurement.uniform_groups.items()
            ],
            "seconds": round(working_seconds() - self.start_seconds, 1),
            "notes": self.notes,
            "identity": self.identity,
            "inputs": journal.inputs.record().digest,
        }
        name = {"path": str(self.model_path), "name": source.get("general.name"), "fingerprint": source.fingerprint()}
        name["architecture"] = self.model.arch
        groups = tuple(g for g in self.groups if g.name in names)
        return Sensitivity(name, text, settings, groups, tuple(costs[p] for p in ordered))

    def _cost(self, pair: Pair, measurement: _Measurement) -> Cost:
        kld, error, change, change_error = (
            measurement.total(measurement.key(pair)).means() if self.runs_to_end(pair) else (None,) * 4
        )
        return Cost(pair.group.name, pair.type, kld, error, change, change_error, feedback=pair.feedback)

    def runs_to_end(self, pair: Pair) -> bool:
        """Return whether a pair runs to the end of the model."""
        return pair in self._full_pairs

    def runs(self, pair: Pair) -> bool:
        """Return whether a pair runs, at least to the end of its layer."""
        return pair in self._full_pairs or not self.options.proxies_only

    def report(self, current: float, total: float, text: str) -> None:
        if self.progress is not None:
            self.progress(Progress(current, total, text))


class _Measurement:
    """The measurements of a run, layer by layer."""

    def __init__(self, run: _Run, journal: Journal, folder: Path, encoder: Encoder, layers: Sequence[Layer]) -> None:
        self.owner = run
        self.journal = journal
        self.folder = folder
        self.encoder = encoder
        self.layers = layers
        self.graph = run.model.unfused
        self.runner = Runner(run.model, run.options.n_ctx, run.batch_windows, run.first)
        self.batches = range(0, len(run.windows), run.batch_windows)
        self.activations = self._open_store("itself")
        self.work_done = self.work_total = 0.0
        self.pairs: Mapping[int, list[Pair]] = {}
        #: The groups of each type that is measured for all groups at once, and the types still to be measured so.
        self.uniform_groups: Mapping[TensorType, list[str]] = {}
        self.uniform_models: list[UniformModel] = []

    def _open_store(self, name: str) -> ActivationStore:
        run = self.owner
        return ActivationStore(self.folder / name, len(run.windows), run.options.n_ctx, run.rows)

    def key(self, pair: Pair, *parts: str) -> Key:
        """Return the journal key of a pair's measurement; with the first window of a batch as a part, the batch's."""
        return (pair.group.name, pair.type.name, "fed" if pair.feedback else "", *parts)

    def uniform_key(self, t: TensorType) -> Key:
        """Return the journal key of the measurements with all groups in a type."""
        return ("", t.name, "together")

    def _has(self, key: Key) -> bool:
        """Return whether all batches of a measurement are done."""
        return all((*key, str(begin)) in self.journal.measurements for begin in self.batches)

    def total(self, key: Key) -> Sums:
        """Return the sums of a measurement over all batches."""
        total = Sums()
        for begin in self.batches:
            total = total.add(Sums(*self.journal.measurements[(*key, str(begin))]))
        return total

    def error_at_end(self, pair: Pair) -> float | None:
        """Return the mean squared error at the end of a pair's layer, relative to the base; None if unknown."""
        if not self._has(self.key(pair, "end")):
            return None
        n, total = np.sum(
            [self.journal.measurements[self.key(pair, "end", str(begin))] for begin in self.batches], axis=0
        )
        return float(total / n)

    def experts(self, group: str, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return a group's ``settings["experts"]`` row, with the share of each type's error on rare experts."""
        row = self.owner.routings[group].settings_row()
        group_pairs = [p for p in pairs if p.group.name == group and not p.feedback]
        errors = {p.type.name: self.journal.measurements.get(self.key(p, "experts"), [0.0, 0.0]) for p in group_pairs}
        return {**row, "rare_errors": {name: rare / total for name, (rare, total) in errors.items() if total > 0}}

    def nll(self) -> float | None:
        """Return the mean negative log-likelihood of the base model; None if nothing was measured."""
        if not self._has(BASE):
            return None
        n, total = np.sum([self.journal.measurements[(*BASE, str(begin))] for begin in self.batches], axis=0)
        return float(total / n)

    def begin(self, pairs: Mapping[int, list[Pair]]) -> None:
        """Take the pairs of each layer, and estimate the work, in layer runs."""
        self.pairs = pairs
        per_type = len(self.layers) * len(self.batches)
        if self.owner.options.together:
            type_groups = groups_by_type(p for layer_pairs in pairs.values() for p in layer_pairs)
            self.uniform_groups = {t: type_groups[t] for t in self.owner.types if t in type_groups}
        for t, groups in self.uniform_groups.items():
            self.work_total += per_type
            if self._has(self.uniform_key(t)):
                self.work_done += per_type
            else:
                self.uniform_models.append(UniformModel(t, groups, self._open_store(t.name)))
        for number, layer_pairs in pairs.items():
            self.work_total += len(layer_pairs) + len(self.batches) * self.effort(number, self.runnable(layer_pairs))

    def effort(self, number: int, pairs: Sequence[Pair]) -> float:
        """Return the work of measuring pairs of a layer, in layer runs."""
        through = sum(self.owner.runs_to_end(p) for p in pairs)
        return 0.5 * len(pairs) + through * (len(self.layers) - 1 - number)

    def runnable(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs that run at all."""
        return [p for p in pairs if self.owner.runs(p)]

    def final_key(self, pair: Pair) -> Key:
        """Return the journal key whose presence completes a pair."""
        return self.key(pair) if self.owner.runs_to_end(pair) else self.key(pair, "end")

    def is_done(self, pair: Pair, begin: int) -> bool:
        """Return whether a batch of a pair is measured."""
        return (*self.final_key(pair), str(begin)) in self.journal.measurements

    def advance(self, work: float, text: str) -> None:
        self.work_done += work
        self.owner.report(self.work_done, self.work_total, text)

    def run(self) -> None:
        """Measure layer by layer."""
        last = max((n for n, pairs in self.pairs.items() if self._is_open(pairs)), default=-1)
        last = len(self.layers) - 1 if self.uniform_models else last
        for number in range(len(self.layers)):
            pairs = self.pairs[number]
            if number > last:
                self.advance(len(pairs) + len(self.batches) * self.effort(number, self.runnable(pairs)), "")
                continue
            _LayerRun(self, number, self._encode(pairs)).run()

    def _is_open(self, pairs: Sequence[Pair]) -> bool:
        missing = any(self.key(p, "errors") not in self.journal.measurements for p in pairs)
        return missing or not all(self._has(self.final_key(p)) for p in self.runnable(pairs))

    def _encode(self, pairs: Sequence[Pair]) -> dict[Pair, EncodedPair]:
        """Encode the open pairs of a layer; return those that are measured alone."""
        result = {}
        for pair in pairs:
            open_ = self.owner.runs(pair) and not self._has(self.final_key(pair))
            uniform = [model for model in self.uniform_models if model.type is pair.type and not pair.feedback]
            if open_ or uniform or self.key(pair, "errors") not in self.journal.measurements:
                encoded_pair = self.encoder.encode(pair, self.folder)
                self.journal.add(self.key(pair, "errors"), list(encoded_pair.sums))
                routing = self.owner.routings.get(pair.group.name)
                if routing is not None:
                    self.journal.add(self.key(pair, "experts"), routing.errors(encoded_pair.matrix_sums))
                if open_:
                    result[pair] = encoded_pair
                for model in uniform:
                    model.add(encoded_pair)
            self.advance(1, f"encode {pair}")
        return result


class _LayerRun:
    """One layer: the base's activations, and the variants with replaced tensors."""

    def __init__(self, measurement: _Measurement, number: int, encoded_pairs: Mapping[Pair, EncodedPair]) -> None:
        self.measurement = measurement
        self.number = number
        self.encoded_pairs = encoded_pairs
        self.layer = measurement.layers[number]
        self.runner = measurement.runner
        graph = measurement.graph
        self.variants = {p.group.name: variant_of(graph, self.layer, p.group.tensors.keys()) for p in encoded_pairs}
        values = [v for stage, _ in self.variants.values() for v in stage.graph.inputs]
        self.graph = with_leaves(self.layer.stage.graph, values)
        self.programs = self.runner.compile(self.graph)
        self.tail = self.layer.tail.graph if self.layer.tail is not None and encoded_pairs else None
        self.tail_programs = None if self.tail is None else self.runner.compile(self.tail)

    def run(self) -> None:
        """Measure all open pairs of this layer."""
        measurement, run = self.measurement, self.measurement.owner
        for begin in measurement.batches:
            self._batch(begin, run.windows[begin : begin + run.batch_windows])
        following = measurement.layers[self.number + 1 :]
        measurement.activations.keep_only(v for layer in following for v in layer.stage.graph.inputs)
        for model in measurement.uniform_models:
            model.finish_layer(measurement.graph, measurement.layers, self.number)

    def _batch(self, begin: int, windows: I32) -> None:
        measurement, run = self.measurement, self.measurement.owner
        tokens = windows.copy()
        if run.bos is not None:
            tokens[:, 0] = run.bos
        batch = self.runner.batch(tokens)
        tail = self.layer.tail.graph.inputs if self.layer.tail is not None else ()
        outputs = {v for op in self.graph.ops for v in op.outputs()}
        sources = dict.fromkeys([*self.graph.inputs, *(v for v in tail if v not in outputs)])
        inputs: Values = {v: measurement.activations.read(v, begin, len(windows)) for v in sources}
        base_values = {**inputs, **self.runner.run(self.programs, self.graph, batch, inputs)}
        for value in self.layer.stage.graph.leaves:
            measurement.activations.write(value, begin, base_values[value])
        running = measurement.runnable(measurement.pairs[self.number])
        pending = [p for p in running if not measurement.is_done(p, begin)]
        measurement.advance(measurement.effort(self.number, [p for p in running if p not in pending]), "")
        base: Base | None = None
        if any(map(run.runs_to_end, pending)) or measurement.uniform_models and self.layer.tail is None:
            base = Base(self._logits(batch, base_values, {}), windows[:, run.first + 1 :].reshape(-1), run.pool)
            measurement.journal.add((*BASE, str(begin)), [float(len(base.nll)), float(base.nll.sum())])
        self._run_uniform(begin, len(windows), batch, base)
        self._run_pairs(begin, pending, batch, base_values, base)

    def _run_uniform(self, begin: int, count: int, batch: Batch, base: Base | None) -> None:
        measurement = self.measurement
        for model in measurement.uniform_models:
            values = model.run(self.runner, self.layer, batch, begin, count)
            if base is not None and self.layer.tail is None:
                measurement.journal.add(
                    (*measurement.uniform_key(model.type), str(begin)),
                    list(base.compare(values[measurement.graph.logits])),
                )
            measurement.advance(1, f"all in {model.type}, layer {self.number + 1} of {len(measurement.layers)}")

    def _run_pairs(
        self, begin: int, pairs: Sequence[Pair], batch: Batch, base_values: Values, base: Base | None
    ) -> None:
        """Measure pairs: to the end of the layer, and full runs against ``base``."""
        measurement = self.measurement
        for pair in pairs:
            stage, extends_to_end = self.variants[pair.group.name]
            programs = self.runner.compile(stage.graph, self.encoded_pairs[pair].data)
            changed = self.runner.run(programs, stage.graph, batch, base_values)
            if stage.graph.leaves:
                measurement.journal.add(
                    measurement.key(pair, "end", str(begin)), relative_error(changed, base_values, stage.graph.leaves)
                )
            if measurement.owner.runs_to_end(pair):
                assert base is not None
                logits = (
                    changed[measurement.graph.logits] if extends_to_end else self._logits(batch, base_values, changed)
                )
                measurement.journal.add(measurement.key(pair, str(begin)), list(base.compare(logits)))
            measurement.advance(measurement.effort(self.number, [pair]), f"measure {pair}")

    def _logits(self, batch: Batch, base_values: Values, changed: Values) -> npt.NDArray[np.float32]:
        values = {**base_values, **changed}
        if self.tail is None or self.tail_programs is None:
            return values[self.measurement.graph.logits]
        return self.runner.run(self.tail_programs, self.tail, batch, values)[self.measurement.graph.logits]


def full_runs_of(count: int | None, types: int, *, proxies_only: bool = False) -> int | None:
    """Return the number of a group's ``types`` types that run to the end of the model, None for all.

    Args:
        count: as in the options.

    Raises RecipeError for an invalid number.
    """
    if count is not None and count != -1 and count < 1:
        raise RecipeError(f"--full-runs {count} must be greater than 0, or -1 for all", "QK-E203")
    if proxies_only or count == -1:
        return None
    return count if count is not None or types <= ALL_FULL_TYPES else FULL_RUNS


def _completeness(count: int | None, proxies_only: bool) -> float:
    """Return a rank by the number of types of a group that run to the end of the model."""
    if proxies_only:
        return 0.5
    return math.inf if count is None else count
