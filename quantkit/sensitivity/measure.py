"""``sensitivity``: measure what quantizing each group of tensors alone costs, in each of some types.

Layer by layer: the model itself runs a layer for a batch of windows; for each pair of a group and a type only what
depends on the group runs anew, then the layers behind. So a model is in memory once, and with it the encoded tensors of
one layer. What the model itself gives at the layer's beginning lies in files beside the output.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.cpus import available_cpus
from quantkit.errors import RecipeError, ResourceError
from quantkit.evaluate.likelihood import chunked
from quantkit.evaluate.passes import bos_of, note_calibration, note_context, text_tokens
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.outputs import Output, beside, check_apart, read_text, written
from quantkit.formats.remote import URL
from quantkit.kernels.first_run import working_seconds
from quantkit.kernels.levels import all_levels
from quantkit.model.batch import Batch
from quantkit.model.engine import Model, load
from quantkit.model.selection import without_selection
from quantkit.pipeline.cache.store import open_store
from quantkit.pipeline.feedback import Recorded
from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.run import DEFAULT_MAX_RAM
from quantkit.sensitivity.encode import Encoded, Encoder, Encoding, Pair, groups_of, pairs_of, types_of
from quantkit.sensitivity.experts import routings
from quantkit.sensitivity.file import Cost, Sensitivity, read_sensitivity
from quantkit.sensitivity.journal import Journal, Key
from quantkit.sensitivity.kept import Kept
from quantkit.sensitivity.layer_errors import error_between, with_layer_errors
from quantkit.sensitivity.proxies import probes_of, rank_correlations, spread, with_proxies
from quantkit.sensitivity.scores import Base, Sums
from quantkit.sensitivity.together import Together, groups_in, row_of
from quantkit.sensitivity.variants import (
    Changed,
    Layer,
    Runner,
    Values,
    ends_within,
    first_layer,
    layers_of,
    variant_of,
    with_leaves,
)
from quantkit.types import TensorType, type_by_name
from quantkit.version import __version__

I32 = npt.NDArray[np.int32]

#: What is measured unless types are named; those that need an importance matrix only with one.
TYPES = ("IQ1_M", "IQ2_XXS", "IQ2_S", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
#: Types of each group that run to the end of the model unless a number is given, and how few types all do.
FULL_RUNS, FEW = 2, 4
#: What the journal calls the likelihood of the model itself.
BASE: Key = ("", "", "base")
#: Bytes of logits that are held of a batch, those of the base with their probabilities.
_LOGITS = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityOptions:
    """What is measured, on how much text, and how.

    types: by name; none for ``TYPES``. groups: ``class-layer`` or ``tensor``. feedback: a file of covariances; types
    that can be are then encoded with error feedback, too. n_ctx: tokens of a chunk; chunks: how many, None for all.
    n_batch: tokens that go through the layers together. full_runs: types of each group that run to the end of the
    model, -1 for all, None for two if there are more than four types; what the others cost follows from the error that
    they leave at the end of their layer, and their ``Cost.kld`` is None.
    proxies_only: measure one type of each group, guess the others.
    together: also measure the model with all groups in each type, which shows how costs combine.
    """

    types: tuple[str, ...] = ()
    imatrix: Path | None = None
    groups: str = "class-layer"
    feedback: Path | None = None
    n_ctx: int = 512
    chunks: int | None = None
    n_batch: int = 4096
    kv_type: str = "f16"
    full_runs: int | None = None
    proxies_only: bool = False
    together: bool = True
    allow_requantize: bool = False
    threads: int | None = None
    max_ram: int | None = None
    cache: Path | None = None
    cache_size: int | None = None
    resume: bool = False
    overwrite: bool = False


class SensitivityProgress(NamedTuple):
    """How far a run is: ``done`` of ``total`` steps of about equal time, and what it does."""

    done: float
    total: float
    text: str


#: Is told of progress, and what the user should know.
Progress = Callable[[SensitivityProgress], None]


def sensitivity(
    model: str | Path,
    out: str | Path,
    files: Sequence[str | Path] = (),
    *,
    tokens: npt.ArrayLike | None = None,
    options: SensitivityOptions | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what quantizing each group of tensors alone costs on held-out text, and write it to ``out``.

    Args:
        model: a GGUF file of full precision; files: texts, or ``tokens``, int32 [n].
        out: the file to write, as ``read_sensitivity`` reads it; ``settings["notes"]`` is what the user should know.

    Raises:
        RecipeError: options that make no sense, a type that can be measured of no group.
        ResourceError: the output exists, another run writes it, or an interrupted run is not resumed.
        QuantkitError: too little text; what quantize and load raise.
    """
    options, model, out = options or SensitivityOptions(), Path(model), Path(out)
    if isinstance(model, URL) or str(model).startswith(("http://", "https://", "s3://")):
        raise ResourceError(f"{model}: sensitivity runs the model, from a file on this machine: copy it first")
    if (tokens is None) == (not files):
        raise RecipeError("sensitivity is measured on a text: give texts (-f), or tokens")
    check_apart([out, beside(out, ".journal")], [model, *files, options.imatrix, options.feedback])
    with ExitStack() as stack:
        stack.enter_context(Output(out, overwrite=options.overwrite or options.resume))
        run = _Run(model, out, files, tokens, options, progress, stack)
        there = run.finished()
        return there if there is not None else run.run()


class _Run:
    """One run: what it measures, and its state."""

    def __init__(
        self,
        model: Path,
        out: Path,
        files: Sequence[str | Path],
        tokens: npt.ArrayLike | None,
        options: SensitivityOptions,
        progress: Progress | None,
        stack: ExitStack,
    ) -> None:
        self.started = working_seconds()
        self.model_path, self.out, self.files, self.options, self.progress = model, out, files, options, progress
        self.threads = options.threads or available_cpus()
        if options.full_runs is not None and options.proxies_only:
            raise RecipeError("--proxies-only runs one type of each group: give it or --full-runs")
        self.encoding = Encoding(options.imatrix, options.feedback, options.allow_requantize)
        names = options.types or [n for n in TYPES if options.imatrix or type_by_name(n).imatrix != "required"]
        self.types = types_of(names)
        #: Types of each group that run to the end of the model, None for all.
        self.full_runs = full_runs_of(options.full_runs, len(self.types), proxies_only=options.proxies_only)
        self.groups = groups_of(model, self.encoding, options.groups)
        imatrix = None if options.imatrix is None else read_imatrix(options.imatrix)
        self.routings = routings(self.groups, imatrix)
        self.pairs, left_out = pairs_of(self.groups, self.types, self.encoding)
        self.notes = [f"left out: {_listed(names)}: {why}" for why, names in left_out.items()]
        #: What is no fact of the file, which is the same however often its run was killed.
        self.of_run: list[str] = []
        self.model: Model = stack.enter_context(
            load(
                model,
                threads=self.threads,
                n_ctx=options.n_ctx,
                kv_type=options.kv_type,
                max_ram=options.max_ram,
                rewrite=partial(without_selection, n_ctx=options.n_ctx),
                wrap=Changed,
            )
        )
        ids = self._tokens(tokens)
        self.windows = chunked(ids, options.n_ctx, options.chunks)
        note_context(self.model, options.n_ctx, self.notes)
        note_calibration(self.model, None, ids, self.notes)
        self.bos = bos_of(self.model, self.notes)
        self.first = options.n_ctx // 2
        self.rows = options.n_ctx - 1 - self.first
        fits = _LOGITS // (8 * self.rows * self.model.n_vocab)
        self.at_once = max(1, min(len(self.windows), options.n_batch // options.n_ctx, fits))
        self.identity = self._identity()
        self.pool = stack.enter_context(ThreadPoolExecutor(self.threads))

    def _tokens(self, tokens: npt.ArrayLike | None) -> I32:
        if tokens is not None:
            return text_tokens(self.model, None, tokens)
        parts = [text_tokens(self.model, read_text(f).removesuffix(b"\n"), None) for f in self.files]
        return np.concatenate(parts)

    def _identity(self) -> str:
        """Return a SHA-256 of all that decides what is measured of a pair."""
        o = self.options
        imatrix = None if o.imatrix is None else read_imatrix(o.imatrix).sha256
        feedback = None if o.feedback is None else Recorded(o.feedback).identity
        what = (__version__, self.model.source.fingerprint(), imatrix, feedback, o.groups, o.kv_type, self.bos)
        shape = (self.windows.shape, self.at_once, self.first)
        return hashlib.sha256(repr((what, shape)).encode() + self.windows.tobytes()).hexdigest()

    def finished(self) -> Sensitivity | None:
        """Return what the output holds already, if an earlier run came to its end. ResourceError for another file."""
        if not self.out.exists() or self.options.overwrite:
            return None
        found = read_sensitivity(self.out)
        asked = {t.name for t in self.types} <= set(found.settings.get("types", ()))
        has = _full_runs(found.settings.get("full_runs"), bool(found.settings.get("proxies_only")))
        asked = asked and has >= _full_runs(self.full_runs, self.options.proxies_only)
        if found.settings.get("identity") == self.identity and asked:
            return found
        raise ResourceError(f"{self.out} exists, and is not what this run would make: --overwrite replaces it")

    # ------------------------------------------------------------ the run

    def run(self) -> Sensitivity:
        """Measure all pairs and write the output."""
        o = self.options
        journal = Journal(self.out, self.identity, resume=o.resume, overwrite=o.overwrite)
        folder = beside(self.out, ".activations")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            found = self._measured(journal, folder)
            with written(self.out) as part:
                part.write_text(found.to_json())
        except BaseException:
            journal.close(remove=False)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        journal.close(remove=True)
        return replace(found, settings={**found.settings, "notes": [*self.notes, *self.of_run]})

    def _measured(self, journal: Journal, folder: Path) -> Sensitivity:
        o = self.options
        layers = layers_of(self.model.whole)
        at = {g.name: first_layer(layers, self.model.whole, g.tensors.keys()) for g in self.groups}
        if unread := [name for name, layer in at.items() if layer is None]:
            self.notes.append(f"left out: {_listed(unread)}: nothing reads it when the model runs")
        pairs = [p for p in self.pairs if at[p.group.name] is not None]
        if o.feedback is not None:
            fed = [p._replace(feedback=True) for p in pairs if p.type.name in all_levels()]
        store = None if o.cache is None else open_store(o.cache, size=o.cache_size)
        every = [*pairs, *(fed if o.feedback is not None else ())]
        encoder = Encoder(self.model_path, every, self.encoding, self.threads, o.max_ram or DEFAULT_MAX_RAM, store)
        every = [p for p in every if not p.feedback or encoder.is_fed(p)]
        self.notes += encoder.notes
        chosen = set(every) if self.full_runs is None else spread(every, self.full_runs)
        probes = probes_of([p for p in every if p in chosen])
        if self.full_runs is not None and len(chosen) < len(every):
            self.notes.append(
                f"{self.full_runs} types of each group run to the end of the model, others to the end of their layer: "
                "--full-runs -1 for all"
            )
        self._wanted = probes if o.proxies_only else chosen | self._without_end(every, at, layers)
        measured = _Measured(self, journal, folder, encoder, layers)
        measured.begin({n: [p for p in every if at[p.group.name] == n] for n in range(len(layers))})
        try:
            measured.run()
        except BaseException:
            encoder.drop()
            raise
        self.of_run = encoder.close()
        return self._result(journal, every, probes, measured)

    def _without_end(self, pairs: Sequence[Pair], at: Mapping[str, int | None], layers: Sequence[Layer]) -> set[Pair]:
        """Return pairs whose error cannot be seen before the logits."""
        graph, found = self.model.whole, set[Pair]()
        for pair in pairs:
            number = at[pair.group.name]
            if number is not None and not ends_within(graph, layers[number], pair.group.tensors.keys()):
                found.add(pair)
        return found

    def _result(self, journal: Journal, pairs: Sequence[Pair], probes: set[Pair], by: _Measured) -> Sensitivity:
        o = self.options
        sums = {p: ErrorSums(*journal.done[by.key(p, "errors")]) for p in pairs}
        ends = {p: found for p in pairs if (found := by.error_at_end(p)) is not None}
        known = {p: self._cost(p, by) for p in pairs}
        costs = with_layer_errors(with_proxies(known, sums, probes), ends)
        correlations = rank_correlations(costs, probes)
        order = {g.name: i for i, g in enumerate(self.groups)}
        types = {t: i for i, t in enumerate(self.types)}
        ordered = sorted(costs, key=lambda p: (order[p.group.name], types[p.type], p.feedback))
        have = {p.group.name for p in pairs}
        source = self.model.source
        text = {
            "files": [Path(f).name for f in self.files],
            "sha256": [hashlib.sha256(read_text(f)).hexdigest() for f in self.files],
            **{"n_ctx": o.n_ctx, "chunks": len(self.windows), "scored": len(self.windows) * self.rows, "bos": self.bos},
        }
        settings: dict[str, Any] = {
            "version": __version__,
            "types": [t.name for t in self.types],
            "groups": o.groups,
            "imatrix": None if o.imatrix is None else o.imatrix.name,
            "feedback": None if o.feedback is None else o.feedback.name,
            "kv_type": o.kv_type,
            "full_runs": self.full_runs,
            "proxies_only": o.proxies_only,
            "probes": {p.group.name: p.type.name for p in sorted(probes, key=lambda p: order[p.group.name])},
            "rank_correlation": correlations,
            "nll": by.nll(),
            "experts": {name: by.experts(name, pairs) for name in self.routings},
            "together": [row_of(t, groups, by.total(by.together_key(t))) for t, groups in by.all_in.items()],
            "seconds": round(working_seconds() - self.started, 1),
            "notes": self.notes,
            "identity": self.identity,
        }
        name = {"path": str(self.model_path), "name": source.get("general.name"), "fingerprint": source.fingerprint()}
        name["architecture"] = self.model.arch
        groups = tuple(g for g in self.groups if g.name in have)
        return Sensitivity(name, text, settings, groups, tuple(costs[p] for p in ordered))

    def _cost(self, pair: Pair, by: _Measured) -> Cost:
        kld, error, change, its_error = by.total(by.key(pair)).means() if self.wants(pair) else (None,) * 4
        return Cost(pair.group.name, pair.type, kld, error, change, its_error, feedback=pair.feedback)

    def wants(self, pair: Pair) -> bool:
        """Tell whether a pair runs to the end of the model."""
        return pair in self._wanted

    def runs(self, pair: Pair) -> bool:
        """Tell whether a pair runs, to the end of its layer at least."""
        return pair in self._wanted or not self.options.proxies_only

    def tell(self, done: float, total: float, text: str) -> None:
        if self.progress is not None:
            self.progress(SensitivityProgress(done, total, text))


class _Measured:
    """The measurements of a run, layer by layer."""

    def __init__(self, run: _Run, journal: Journal, folder: Path, encoder: Encoder, layers: Sequence[Layer]) -> None:
        self.run_of, self.journal, self.folder, self.encoder, self.layers = run, journal, folder, encoder, layers
        self.graph = run.model.whole
        self.runner = Runner(run.model, run.options.n_ctx, run.at_once, run.first)
        self.batches = range(0, len(run.windows), run.at_once)
        self.kept = self._kept("itself")
        self.done = self.total_work = 0.0
        self.pairs: Mapping[int, list[Pair]] = {}
        #: The groups of each type that is measured as a whole, and those types of which that is open.
        self.all_in: Mapping[TensorType, list[str]] = {}
        self.together: list[Together] = []

    def _kept(self, name: str) -> Kept:
        run = self.run_of
        return Kept(self.folder / name, len(run.windows), run.options.n_ctx, run.rows)

    def key(self, pair: Pair, *what: str) -> Key:
        """Return what the journal calls a measurement of a pair; with the first window of a batch, that of a batch."""
        return (pair.group.name, pair.type.name, "fed" if pair.feedback else "", *what)

    def together_key(self, t: TensorType) -> Key:
        """Return what the journal calls the measurements of all groups in a type."""
        return ("", t.name, "together")

    def _has(self, key: Key) -> bool:
        """Tell whether all batches of a measurement are done."""
        return all((*key, str(begin)) in self.journal.done for begin in self.batches)

    def total(self, key: Key) -> Sums:
        """Return the sums of a measurement over all batches."""
        total = Sums()
        for begin in self.batches:
            total = total.plus(Sums(*self.journal.done[(*key, str(begin))]))
        return total

    def error_at_end(self, pair: Pair) -> float | None:
        """Return the mean squared error at the end of a pair's layer, relative to the values there; None if unknown."""
        if not self._has(self.key(pair, "end")):
            return None
        n, total = np.sum([self.journal.done[self.key(pair, "end", str(begin))] for begin in self.batches], axis=0)
        return float(total / n)

    def experts(self, group: str, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return how experts of a group are chosen, and the share of each type's error that rare ones have."""
        row = self.run_of.routings[group].row()
        own = [p for p in pairs if p.group.name == group and not p.feedback]
        found = {p.type.name: self.journal.done.get(self.key(p, "experts"), [0.0, 0.0]) for p in own}
        return {**row, "rare_errors": {name: rare / total for name, (rare, total) in found.items() if total > 0}}

    def nll(self) -> float | None:
        """Return the mean negative log-likelihood of the model itself; None if nothing was measured."""
        if not self._has(BASE):
            return None
        n, total = np.sum([self.journal.done[(*BASE, str(begin))] for begin in self.batches], axis=0)
        return float(total / n)

    def begin(self, pairs: Mapping[int, list[Pair]]) -> None:
        """Take the pairs of each layer, and foresee the work: layers that run."""
        self.pairs = pairs
        per_type = len(self.layers) * len(self.batches)
        if self.run_of.options.together:
            found = groups_in(p for of_layer in pairs.values() for p in of_layer)
            self.all_in = {t: found[t] for t in self.run_of.types if t in found}
        for t, groups in self.all_in.items():
            self.total_work += per_type
            if self._has(self.together_key(t)):
                self.done += per_type
            else:
                self.together.append(Together(t, groups, self._kept(t.name)))
        for number, of_layer in pairs.items():
            self.total_work += len(of_layer) + len(self.batches) * self.effort(number, self.running(of_layer))

    def effort(self, number: int, pairs: Sequence[Pair]) -> float:
        """Return what measuring pairs of a layer takes: layers that run."""
        through = sum(self.run_of.wants(p) for p in pairs)
        return 0.5 * len(pairs) + through * (len(self.layers) - 1 - number)

    def running(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs that run."""
        return [p for p in pairs if self.run_of.runs(p)]

    def goal(self, pair: Pair) -> Key:
        """Return what the journal calls all that is measured of a pair."""
        return self.key(pair) if self.run_of.wants(pair) else self.key(pair, "end")

    def is_done(self, pair: Pair, begin: int) -> bool:
        """Tell whether a batch of a pair is measured."""
        return (*self.goal(pair), str(begin)) in self.journal.done

    def _tell(self, more: float, text: str) -> None:
        self.done += more
        self.run_of.tell(self.done, self.total_work, text)

    def run(self) -> None:
        """Go through the layers."""
        last = max((n for n, pairs in self.pairs.items() if self._is_open(pairs)), default=-1)
        last = len(self.layers) - 1 if self.together else last
        for number in range(len(self.layers)):
            pairs = self.pairs[number]
            if number > last:
                self._tell(len(pairs) + len(self.batches) * self.effort(number, self.running(pairs)), "")
                continue
            _OfLayer(self, number, self._encoded(pairs)).run()

    def _is_open(self, pairs: Sequence[Pair]) -> bool:
        missing = any(self.key(p, "errors") not in self.journal.done for p in pairs)
        return missing or not all(self._has(self.goal(p)) for p in self.running(pairs))

    def _encoded(self, pairs: Sequence[Pair]) -> dict[Pair, Encoded]:
        """Encode what is to be measured of a layer; return what is measured alone."""
        found = {}
        for pair in pairs:
            open_ = self.run_of.runs(pair) and not self._has(self.goal(pair))
            whole = [each for each in self.together if each.type is pair.type and not pair.feedback]
            if open_ or whole or self.key(pair, "errors") not in self.journal.done:
                made = self.encoder.encode(pair, self.folder)
                self.journal.add(self.key(pair, "errors"), list(made.sums))
                routing = self.run_of.routings.get(pair.group.name)
                if routing is not None:
                    self.journal.add(self.key(pair, "experts"), routing.errors(made.of_matrices))
                if open_:
                    found[pair] = made
                for each in whole:
                    each.take(made)
            self._tell(1, f"encode {pair}")
        return found


class _OfLayer:
    """A layer: the model's own values there, and what becomes of them with other tensors."""

    def __init__(self, of: _Measured, number: int, encoded: Mapping[Pair, Encoded]) -> None:
        self.of, self.number, self.encoded = of, number, encoded
        self.layer, self.runner, graph = of.layers[number], of.runner, of.graph
        self.variants = {p.group.name: variant_of(graph, self.layer, p.group.tensors.keys()) for p in encoded}
        wanted = [v for stage, _ in self.variants.values() for v in stage.graph.given]
        self.own = with_leaves(self.layer.own.graph, wanted)
        self.programs = self.runner.compile(self.own)
        self.tail = self.layer.tail.graph if self.layer.tail is not None and encoded else None
        self.behind = None if self.tail is None else self.runner.compile(self.tail)

    def run(self) -> None:
        """Measure all that is open of this layer."""
        of, run = self.of, self.of.run_of
        for begin in of.batches:
            self._batch(begin, run.windows[begin : begin + run.at_once])
        following = of.layers[self.number + 1 :]
        of.kept.keep_only(v for layer in following for v in layer.own.graph.given)
        for whole in of.together:
            whole.leave(of.graph, of.layers, self.number)

    def _batch(self, begin: int, windows: I32) -> None:
        of, run = self.of, self.of.run_of
        tokens = windows.copy()
        if run.bos is not None:
            tokens[:, 0] = run.bos
        batch = self.runner.batch(tokens)
        tail = self.layer.tail.graph.given if self.layer.tail is not None else ()
        made = {v for op in self.own.ops for v in op.outputs()}
        wanted = dict.fromkeys([*self.own.given, *(v for v in tail if v not in made)])
        given: Values = {v: of.kept.read(v, begin, len(windows)) for v in wanted}
        own = {**given, **self.runner.run(self.programs, self.own, batch, given)}
        for value in self.layer.own.graph.leaves:
            of.kept.write(value, begin, own[value])
        running = of.running(of.pairs[self.number])
        left = [p for p in running if not of.is_done(p, begin)]
        of._tell(of.effort(self.number, [p for p in running if p not in left]), "")
        base: Base | None = None
        if any(map(run.wants, left)) or of.together and self.layer.tail is None:
            base = Base(self._logits(batch, own, {}), windows[:, run.first + 1 :].reshape(-1), run.pool)
            of.journal.add((*BASE, str(begin)), [float(len(base.nll)), float(base.nll.sum())])
        self._run_together(begin, len(windows), batch, base)
        self._run_alone(begin, left, batch, own, base)

    def _run_together(self, begin: int, count: int, batch: Batch, base: Base | None) -> None:
        of = self.of
        for whole in of.together:
            found = whole.run(self.runner, self.layer, batch, begin, count)
            if base is not None and self.layer.tail is None:
                of.journal.add((*of.together_key(whole.type), str(begin)), list(base.compare(found[of.graph.logits])))
            of._tell(1, f"all in {whole.type}, layer {self.number + 1} of {len(of.layers)}")

    def _run_alone(self, begin: int, left: Sequence[Pair], batch: Batch, own: Values, base: Base | None) -> None:
        """Measure pairs: to the end of the layer, and those that are wanted against ``base``."""
        of = self.of
        for pair in left:
            stage, through = self.variants[pair.group.name]
            programs = self.runner.compile(stage.graph, self.encoded[pair].data)
            changed = self.runner.run(programs, stage.graph, batch, own)
            if stage.graph.leaves:
                of.journal.add(of.key(pair, "end", str(begin)), error_between(changed, own, stage.graph.leaves))
            if of.run_of.wants(pair):
                assert base is not None
                logits = changed[of.graph.logits] if through else self._logits(batch, own, changed)
                of.journal.add(of.key(pair, str(begin)), list(base.compare(logits)))
            of._tell(of.effort(self.number, [pair]), f"measure {pair}")

    def _logits(self, batch: Batch, own: Values, changed: Values) -> npt.NDArray[np.float32]:
        values = {**own, **changed}
        if self.tail is None or self.behind is None:
            return values[self.of.graph.logits]
        return self.runner.run(self.behind, self.tail, batch, values)[self.of.graph.logits]


def full_runs_of(given: int | None, types: int, *, proxies_only: bool = False) -> int | None:
    """Return how many of ``types`` types of a group run to the end of the model, None for all.

    ``given``: as options have it. Raises RecipeError for a number that cannot be.
    """
    if given is not None and given != -1 and given < 1:
        raise RecipeError(f"--full-runs {given} must be above 0, or -1 for all")
    if proxies_only or given == -1:
        return None
    return given if given is not None or types <= FEW else FULL_RUNS


def _full_runs(given: int | None, proxies_only: bool) -> float:
    """Return how many types of a group run to the end of the model."""
    return 0.5 if proxies_only else math.inf if given is None else given


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} groups)"
