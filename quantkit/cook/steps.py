"""The steps before the targets: conversion, texts, importance matrix, covariances, base logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quantkit.arguments import changed_options
from quantkit.convert import convert
from quantkit.cook import estimate
from quantkit.cook.config import Config
from quantkit.cook.encoders import MMPROJ_OPTIONS, MmprojFile
from quantkit.cook.engine import Facts, Step, StepEstimate, StepProgress
from quantkit.cook.source import Model
from quantkit.cook.texts import make_texts, text_inputs
from quantkit.evaluate import Estimate, SaveLogits, perplexity
from quantkit.evaluate.passes import EvaluationOptions
from quantkit.formats.outputs import part_path, read_text
from quantkit.imatrix import ImatrixOptions, Watcher, imatrix
from quantkit.imatrix.covariance import CovarianceProgress, covariance
from quantkit.imatrix.snapshot import snapshot_path
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.progress import RunProgress
from quantkit.pipeline.run import RunOptions
from quantkit.quantize import run_quantize

#: Bytes up to which base logits have the whole vocabulary; beyond, only the most probable tokens.
_MAX_FULL_LOGITS = 1 << 30
#: Tokens of a pass, approximately.
_BATCH_TOKENS = 2048
#: Bytes of text per token, approximately.
_BYTES_PER_TOKEN = 4


class PlanCache:
    """The last plan. Only one is kept, because a plan may have an importance matrix in memory."""

    def __init__(self) -> None:
        self._key: object = None
        self._plan: Plan | None = None

    def get(self, key: object, make: Callable[[], Plan]) -> Plan:
        """Return the plan of ``key``, computed by ``make`` unless it is the last one."""
        if self._plan is None or key != self._key:
            self._plan, self._key = make(), key
        return self._plan

    def clear(self) -> None:
        self._key = self._plan = None


@dataclass(frozen=True)
class Paths:
    """All paths of a cook, with the settings and the model that determine them.

    ``mmproj``: files of encoders, made or existing; ``plans``: shared by its steps.
    """

    config: Config
    model: Model
    mmproj: tuple[MmprojFile, ...] = ()
    plans: PlanCache = field(default_factory=PlanCache, compare=False)
    #: The types on whose grid the model's weights lie, in words; "": none.
    grid: str = ""

    def work(self, name: str) -> Path:
        """Return a file of the work folder."""
        return self.config.work / name

    @property
    def source(self) -> Path:
        """The GGUF file that all steps read."""
        return self.work("model.gguf") if self.model.is_checkpoint else self.model.path

    @property
    def calibration(self) -> tuple[Path, ...]:
        """The texts to calibrate on."""
        settings = self.config.calibration
        return (self.work("texts/calibration.txt"),) if settings.is_corpus else settings.text

    @property
    def sensitivity_text(self) -> Path:
        return self.work("texts/sensitivity.txt")

    @property
    def check_text(self) -> Path:
        return self.work("texts/check.txt")

    @property
    def imatrix(self) -> Path | None:
        """The importance matrix, given or collected; None to quantize without one."""
        settings = self.config.imatrix
        return settings.file or (self.work("imatrix.gguf") if settings.run else None)

    @property
    def covariance(self) -> Path:
        return self.config.imatrix.covariance or self.work("covariance.gguf")

    @property
    def base_logits(self) -> Path:
        return self.work("base.logits")

    @property
    def cache(self) -> Path:
        """The folder of encoded tensors, which sensitivity and all targets share."""
        return self.config.cache or self.work("tensors")

    def output(self, label: str) -> Path:
        """Return the file of a target."""
        return self.config.output / f"{self.config.name}-{label}.gguf"

    @property
    def threads(self) -> int:
        return self.config.threads

    def evaluation_options(self) -> EvaluationOptions:
        """Return the options of the engine."""
        options: EvaluationOptions = {"threads": self.threads or None}
        if self.config.max_ram is not None:
            options["max_ram"] = self.config.max_ram
        return options

    def measuring_options(self) -> EvaluationOptions:
        """Return the options of the engine for divergences, which compare only with the same activations."""
        return {**self.evaluation_options(), "activations": self.config.check.activations}

    def run_options(self, progress: StepProgress, total: int) -> RunOptions:
        """Return the options of a run that resumes its own interrupted work and replaces other outputs."""
        return {
            "threads": self.threads or None,
            "resume": True,
            "overwrite": True,
            "observer": RunProgress(progress, total, progress.note),
        }

    @property
    def candidate_logits(self) -> Path:
        return self.work("candidates.logits")

    def calibration_tokens(self) -> int:
        """Return the approximate number of calibration tokens."""
        settings, texts = self.config.imatrix, self.config.calibration
        nbytes = sum(_size(path, texts.size) for path in (*self.calibration, *texts.chat))
        return self._limit_tokens(nbytes, settings.ctx or self.model.ctx, settings.chunks)

    def evaluation_tokens(self, text: Path, ctx: int, chunks: int | None) -> int:
        """Return the approximate number of tokens used of a held-out text, which may not exist yet."""
        texts = self.config.calibration
        held_out = texts.size * texts.heldout if texts.evaluation is None else _size(texts.evaluation, 0)
        return self._limit_tokens(_size(text, int(held_out / 2)), ctx, chunks)

    def _limit_tokens(self, nbytes: int, ctx: int, chunks: int | None) -> int:
        tokens = nbytes // _BYTES_PER_TOKEN
        return tokens if chunks is None else min(tokens, chunks * ctx)


def _size(path: Path, default: int) -> int:
    """Return the bytes of a file, ``default`` if it does not exist yet."""
    try:
        return path.stat().st_size
    except OSError:
        return default


# ---------------------------------------------------------------- the steps


def convert_step(paths: Paths) -> Step:
    """Return the conversion of a checkpoint."""
    model, out = paths.model, paths.source

    def run(progress: StepProgress) -> Facts:
        result = convert(model.path, out, None, model.convert, **paths.run_options(progress, model.nbytes))
        return {"nbytes": result.plan.nbytes, "tensors": len(result.plan.tensors)}

    return Step(
        "convert",
        "the checkpoint as a GGUF file",
        {"the checkpoint": model.path},
        changed_options(paths.config.convert),
        (out,),
        run,
        lambda: StepEstimate(model.nbytes, estimate.copying_seconds(model.nbytes)),
        is_complete=lambda: not part_path(out).exists(),
    )


def mmproj_step(paths: Paths, file: MmprojFile) -> Step:
    """Return the conversion of the encoders of a checkpoint."""
    model, options = paths.model, changed_options(paths.config.convert)

    def run(progress: StepProgress) -> Facts:
        plan = file.plan(model.path, model.convert)
        run_quantize(plan, **paths.run_options(progress, plan.nbytes))
        return {"nbytes": plan.nbytes, "tensors": len(plan.tensors)}

    return Step(
        f"mmproj {file.type}",
        f"{file.description}: {file.path.name}",
        {"the checkpoint": model.path},
        {name: value for name, value in options.items() if name in MMPROJ_OPTIONS},
        (file.path,),
        run,
        lambda: StepEstimate(file.nbytes, estimate.copying_seconds(file.nbytes)),
        is_complete=lambda: not part_path(file.path).exists(),
    )


def texts_step(paths: Paths) -> Step:
    """Return the preparation of the texts."""
    settings = paths.config.calibration
    outputs = [paths.sensitivity_text, paths.check_text]
    options: dict[str, object] = {}
    if settings.evaluation is not None:
        inputs = {"the evaluation text": settings.evaluation}
    else:
        inputs = text_inputs("the text", settings.text)
        options = {name: getattr(settings, name) for name in ("size", "heldout", "seed", "include")}
        outputs += [paths.calibration[0], *(paths.work(f"texts/{n}") for n in ("evaluation.txt", "manifest.json"))]
    run = partial(make_texts, settings, paths.work("texts"), paths.sensitivity_text, paths.check_text)
    nbytes = settings.size if settings.evaluation is None else None
    return Step(
        "texts",
        "texts for calibration, measurement and check",
        inputs,
        options,
        tuple(outputs),
        run,
        lambda: StepEstimate(nbytes, None),
    )


def _batch_size(ctx: int) -> int:
    """Return the tokens of a pass, which has whole chunks."""
    return ctx * max(1, _BATCH_TOKENS // ctx)


class _ChunkProgress(Watcher):
    """Reports the progress of an importance matrix."""

    def __init__(self, progress: StepProgress) -> None:
        self.progress = progress

    def on_start(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        for note in notes:
            self.progress.note(note)
        if first:
            self.progress.note(f"continues after {first} of {n_chunks} chunks")

    def on_chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        self.progress(chunk, n_chunks, "" if ppl is None else f"perplexity {ppl.value:.4f}")

    def on_drop(self, chunk: int, why: str, back_to: int) -> None:
        self.progress.note(f"skipped chunk {chunk + 1}: {why} is NaN or infinite")


def _calibration_inputs(paths: Paths) -> dict[str, Path]:
    return {
        "the model": paths.source,
        **text_inputs("the text", paths.calibration),
        **text_inputs("the conversations", paths.config.calibration.chat),
    }


def _collection_options(ctx: int, chunks: int | None, process_output: bool) -> ImatrixOptions:
    """Return the options of a collection that resumes its own interrupted work and replaces other outputs."""
    return ImatrixOptions(
        n_ctx=ctx,
        n_batch=_batch_size(ctx),
        chunks=chunks,
        process_output=process_output,
        resume=True,
        overwrite=True,
    )


def imatrix_step(paths: Paths, out: Path) -> Step:
    """Return the collection of the importance matrix."""
    settings, model = paths.config.imatrix, paths.model
    ctx = settings.ctx or model.ctx

    def run(progress: StepProgress) -> Facts:
        result = imatrix(
            paths.source,
            paths.calibration,
            out,
            chat=paths.config.calibration.chat,
            options=_collection_options(ctx, settings.chunks, settings.process_output),
            watcher=_ChunkProgress(progress),
            **paths.evaluation_options(),
        )
        ppl = None if result.ppl is None else result.ppl.as_dict()
        return {"chunks": result.n_chunks, "ctx": ctx, "ppl": ppl, "dropped": len(result.dropped)}

    options = {"chunks": settings.chunks, "ctx": ctx, "process_output": settings.process_output}
    return Step(
        "imatrix",
        "the importance matrix",
        _calibration_inputs(paths),
        options,
        (out,),
        run,
        lambda: StepEstimate(None, estimate.forward_seconds(model.active, paths.calibration_tokens(), paths.threads)),
        is_complete=lambda: not snapshot_path(out).exists(),
    )


def covariance_step(paths: Paths) -> Step:
    """Return the recording of covariances, for error feedback."""
    settings, model = paths.config.imatrix, paths.model
    out = paths.covariance
    ctx = settings.ctx or model.ctx

    def run(progress: StepProgress) -> Facts:
        def report_pass(now: CovarianceProgress) -> None:
            text = f"pass {now.number} of {now.n_passes}, {now.inputs}"
            progress((now.number - 1) * now.n_chunks + now.chunk, now.n_passes * now.n_chunks, text)

        result = covariance(
            paths.source,
            paths.calibration,
            out,
            chat=paths.config.calibration.chat,
            options=_collection_options(ctx, settings.chunks, True),
            progress=report_pass,
            **paths.evaluation_options(),
        )
        return {"inputs": result.n_inputs, "passes": result.n_passes, "chunks": result.n_chunks}

    return Step(
        "covariance",
        "covariances of activations, for +feedback",
        _calibration_inputs(paths),
        {"chunks": settings.chunks, "ctx": ctx},
        (out,),
        run,
        lambda: StepEstimate(
            None, 4 * estimate.forward_seconds(model.active, paths.calibration_tokens(), paths.threads)
        ),
        is_complete=lambda: not snapshot_path(out).exists(),
    )


def base_step(paths: Paths) -> Step:
    """Return the computation of the model's own logits on the text to check on."""
    settings, title = paths.config.check, "base logits on the text of the check"
    text, out = paths.check_text, paths.base_logits
    return logits_step(paths, "base", title, text, out, settings.ctx, settings.chunks, settings.logits)


def logits_step(
    paths: Paths,
    name: str,
    title: str,
    text: Path,
    out: Path,
    n_ctx: int | None,
    chunks: int | None,
    logits_format: str,
) -> Step:
    """Return the computation of the model's logits on a text; ``form``: "auto", or that of ``SaveLogits``."""
    model = paths.model
    ctx = n_ctx or model.ctx

    def size_logits() -> tuple[int, int]:
        """Return the approximate number of tokens, and the bytes of their logits over the whole vocabulary."""
        tokens = paths.evaluation_tokens(text, ctx, chunks)
        return tokens, tokens // 2 * 2 * (model.n_vocab + 4)

    def run(progress: StepProgress) -> Facts:
        file_format = logits_format
        if file_format == "auto":
            file_format = "llama.cpp" if size_logits()[1] <= _MAX_FULL_LOGITS else "compact"
        result = perplexity(
            paths.source,
            read_text(text).removesuffix(b"\n"),
            n_ctx=ctx,
            n_batch=_batch_size(ctx),
            chunks=chunks,
            save_logits=SaveLogits(out, file_format, overwrite=True),
            progress=lambda now: progress(now.current, now.total, f"perplexity {now.ppl.value:.4f}"),
            **paths.measuring_options(),
        )
        for note in result.notes:
            progress.note(note)
        return {"ppl": result.ppl.as_dict(), "chunks": result.n_chunks, "ctx": ctx, "format": file_format}

    def estimate_cost() -> StepEstimate:
        tokens, nbytes = size_logits()
        return StepEstimate(
            min(nbytes, _MAX_FULL_LOGITS), estimate.forward_seconds(model.active, tokens, paths.threads)
        )

    return Step(
        name,
        title,
        {"the model": paths.source, "the text": text},
        {"chunks": chunks, "ctx": ctx, "logits": logits_format, "activations": paths.config.check.activations},
        (out,),
        run,
        estimate_cost,
        is_complete=lambda: True,
    )
