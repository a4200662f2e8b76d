"""The steps before the targets: conversion, texts, importance matrix, covariances, base logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from quantkit.convert import convert
from quantkit.cook import estimate
from quantkit.cook.config import Config
from quantkit.cook.engine import Expected, Facts, Step, Tell
from quantkit.cook.source import Model
from quantkit.cook.texts import make_texts, text_inputs
from quantkit.evaluate import Estimate, SaveLogits, perplexity
from quantkit.evaluate.passes import EvaluationOptions
from quantkit.formats.outputs import part_path, read_text
from quantkit.imatrix import ImatrixOptions, Watcher, imatrix
from quantkit.imatrix.checkpoint import state_of
from quantkit.imatrix.covariance import CovarianceProgress, covariance
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.run import RunOptions

#: Base logits of the whole vocabulary up to this size, then only the most probable tokens.
_WHOLE_LOGITS = 1 << 30
#: Tokens of a pass, about.
_BATCH = 2048
#: Bytes of a text a token, about.
_BYTES_A_TOKEN = 4


@dataclass(frozen=True)
class Places:
    """Where everything of a cook lies."""

    config: Config
    model: Model

    def work(self, name: str) -> Path:
        """Return a file of the work folder."""
        return self.config.work / name

    @property
    def source(self) -> Path:
        """The GGUF file that everything is made from."""
        return self.work("model.gguf") if self.model.is_checkpoint else self.model.path

    @property
    def calibration(self) -> tuple[Path, ...]:
        """The texts to calibrate on."""
        settings = self.config.calibration
        return settings.text if settings.evaluation is not None else (self.work("texts/calibration.txt"),)

    @property
    def sensitivity_text(self) -> Path:
        return self.work("texts/sensitivity.txt")

    @property
    def check_text(self) -> Path:
        return self.work("texts/check.txt")

    @property
    def imatrix(self) -> Path | None:
        """The importance matrix, whoever made it; None if there is to be none."""
        settings = self.config.imatrix
        return settings.file or (self.work("imatrix.gguf") if settings.run else None)

    @property
    def covariance(self) -> Path:
        return self.config.imatrix.covariance or self.work("covariance.gguf")

    @property
    def base(self) -> Path:
        return self.work("base.logits")

    @property
    def cache(self) -> Path:
        """The folder of encoded tensors: what sensitivity encodes serves every target."""
        return self.config.cache or self.work("tensors")

    def output(self, called: str) -> Path:
        """Return the file of a target."""
        return self.config.output / f"{self.config.name}-{called}.gguf"

    @property
    def threads(self) -> int:
        return self.config.threads

    def evaluation(self) -> EvaluationOptions:
        """Return how models run."""
        options: EvaluationOptions = {"threads": self.threads or None}
        if self.config.max_ram is not None:
            options["max_ram"] = self.config.max_ram
        return options

    def pipeline(self, tell: Tell, total: int) -> RunOptions:
        """Return how plans are carried out: a killed run goes on, another one is thrown away."""
        return {"threads": self.threads or None, "resume": True, "overwrite": True, "observer": Wrote(tell, total)}

    @property
    def candidates(self) -> Path:
        return self.work("candidates.logits")

    def calibration_tokens(self) -> int:
        """Return about how many tokens are calibrated on."""
        settings, texts = self.config.imatrix, self.config.calibration
        nbytes = sum(_size(path, texts.size) for path in (*self.calibration, *texts.chat))
        return self._limited(nbytes, settings.ctx or self.model.ctx, settings.chunks)

    def measured_tokens(self, text: Path, ctx: int, chunks: int | None) -> int:
        """Return about how many tokens of a held-out text are used, which may not be made yet."""
        texts = self.config.calibration
        whole = texts.size * texts.heldout if texts.evaluation is None else _size(texts.evaluation, 0)
        return self._limited(_size(text, int(whole / 2)), ctx, chunks)

    def _limited(self, nbytes: int, ctx: int, chunks: int | None) -> int:
        tokens = nbytes // _BYTES_A_TOKEN
        return tokens if chunks is None else min(tokens, chunks * ctx)


def _size(path: Path, otherwise: int) -> int:
    """Return the bytes of a file, or what it will have about."""
    try:
        return path.stat().st_size
    except OSError:
        return otherwise


class Wrote:
    """Tells how far a plan is carried out."""

    def __init__(self, tell: Tell, total: int) -> None:
        self.tell, self.total, self.done, self.stage = tell, total, 0, ""

    def resumed(self, tensors: int, nbytes: int) -> None:
        self.tell.note(f"goes on after {tensors} tensors")
        self.wrote(nbytes)

    def wrote(self, nbytes: int) -> None:
        self.done += nbytes
        self.tell(self.done, self.total, self.stage)

    def finished(self, tensor: PlannedTensor) -> None:
        pass

    def said(self, text: str) -> None:
        self.tell.note(text)

    def ran(self, stage: int, stages: int, tokens: int, total: int) -> None:
        self.stage = f"stage {stage + 1} of {stages}"
        self.tell(self.done, self.total, self.stage)


# ---------------------------------------------------------------- the steps


def convert_step(places: Places) -> Step:
    """Return the conversion of a checkpoint."""
    model, out = places.model, places.source

    def run(tell: Tell) -> Facts:
        made = convert(model.path, out, None, model.convert, **places.pipeline(tell, model.nbytes))
        return {"nbytes": made.plan.nbytes, "tensors": len(made.plan.tensors)}

    return Step(
        "convert",
        "the checkpoint as a GGUF file",
        {"the checkpoint": model.path},
        {**asdict(places.config.convert)},
        (out,),
        run,
        lambda: Expected(model.nbytes, estimate.copying_seconds(model.nbytes)),
        whole=lambda: not part_path(out).exists(),
    )


def texts_step(places: Places) -> Step:
    """Return the making of the texts."""
    settings = places.config.calibration
    outputs = [places.sensitivity_text, places.check_text]
    if settings.evaluation is not None:
        inputs, options = {"the evaluation text": settings.evaluation}, dict[str, object]()
    else:
        inputs = text_inputs("the text", settings.text)
        options = {name: getattr(settings, name) for name in ("size", "heldout", "seed", "include")}
        outputs += [places.calibration[0], *(places.work(f"texts/{n}") for n in ("evaluation.txt", "manifest.json"))]
    made = partial(make_texts, settings, places.work("texts"), places.sensitivity_text, places.check_text)
    nbytes = settings.size if settings.evaluation is None else None
    return Step(
        *("texts", "texts to calibrate, to measure and to check on", inputs, options, tuple(outputs), made),
        lambda: Expected(nbytes, None),
    )


def _batched(ctx: int) -> int:
    """Return the tokens of a pass of whole chunks."""
    return ctx * max(1, _BATCH // ctx)


class _Chunks(Watcher):
    """Tells how far an importance matrix is."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def started(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        for note in notes:
            self.tell.note(note)
        if first:
            self.tell.note(f"goes on after {first} of {n_chunks} chunks")

    def chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        self.tell(chunk, n_chunks, "" if ppl is None else f"perplexity {ppl.value:.4f}")

    def dropped(self, chunk: int, why: str, back_to: int) -> None:
        self.tell.note(f"chunk {chunk + 1} is left out: {why} is NaN or infinite")


def _calibration_inputs(places: Places) -> dict[str, Path]:
    return {
        "the model": places.source,
        **text_inputs("the text", places.calibration),
        **text_inputs("the conversations", places.config.calibration.chat),
    }


def _collecting(ctx: int, chunks: int | None, process_output: bool) -> ImatrixOptions:
    """Return how sums are collected: a killed run goes on, another one is thrown away."""
    return ImatrixOptions(
        n_ctx=ctx,
        n_batch=_batched(ctx),
        chunks=chunks,
        process_output=process_output,
        resume=True,
        overwrite=True,
    )


def imatrix_step(places: Places, out: Path) -> Step:
    """Return the collection of the importance matrix."""
    settings, model = places.config.imatrix, places.model
    ctx = settings.ctx or model.ctx

    def run(tell: Tell) -> Facts:
        found = imatrix(
            places.source,
            places.calibration,
            out,
            chat=places.config.calibration.chat,
            options=_collecting(ctx, settings.chunks, settings.process_output),
            watcher=_Chunks(tell),
            **places.evaluation(),
        )
        ppl = None if found.ppl is None else found.ppl.as_dict()
        return {"chunks": found.n_chunks, "ctx": ctx, "ppl": ppl, "dropped": len(found.dropped)}

    options = {"chunks": settings.chunks, "ctx": ctx, "process_output": settings.process_output}
    return Step(
        "imatrix",
        "the importance matrix",
        _calibration_inputs(places),
        options,
        (out,),
        run,
        lambda: Expected(None, estimate.forward_seconds(model.active, places.calibration_tokens(), places.threads)),
        whole=lambda: not state_of(out).exists(),
    )


def covariance_step(places: Places) -> Step:
    """Return the recording of covariances, for error feedback."""
    settings, model, out = places.config.imatrix, places.model, places.covariance
    ctx = settings.ctx or model.ctx

    def run(tell: Tell) -> Facts:
        def progress(now: CovarianceProgress) -> None:
            passes = f"pass {now.number} of {now.n_passes}, {now.what}"
            tell((now.number - 1) * now.n_chunks + now.chunk, now.n_passes * now.n_chunks, passes)

        found = covariance(
            places.source,
            places.calibration,
            out,
            chat=places.config.calibration.chat,
            options=_collecting(ctx, settings.chunks, True),
            progress=progress,
            **places.evaluation(),
        )
        return {"inputs": found.n_inputs, "passes": found.n_passes, "chunks": found.n_chunks}

    return Step(
        "covariance",
        "covariances of what weights multiply, for +feedback",
        _calibration_inputs(places),
        {"chunks": settings.chunks, "ctx": ctx},
        (out,),
        run,
        lambda: Expected(None, 4 * estimate.forward_seconds(model.active, places.calibration_tokens(), places.threads)),
        whole=lambda: not state_of(out).exists(),
    )


def base_step(places: Places) -> Step:
    """Return the computation of the model's own logits on the text to check on."""
    settings, what = places.config.check, "what the model itself predicts on the text to check on"
    text, out = places.check_text, places.base
    return logits_step(places, "base", what, text, out, settings.ctx, settings.chunks, settings.logits)


def logits_step(
    places: Places, name: str, what: str, text: Path, out: Path, n_ctx: int | None, chunks: int | None, form: str
) -> Step:
    """Return the computation of the model's logits on a text; ``form``: "auto", or that of ``SaveLogits``."""
    model = places.model
    ctx = n_ctx or model.ctx

    def sized() -> tuple[int, int]:
        """Return about how many tokens are run, and the bytes of their logits in full."""
        tokens = places.measured_tokens(text, ctx, chunks)
        return tokens, tokens // 2 * 2 * (model.n_vocab + 4)

    def run(tell: Tell) -> Facts:
        chosen = form if form != "auto" else "llama.cpp" if sized()[1] <= _WHOLE_LOGITS else "compact"
        found = perplexity(
            places.source,
            read_text(text).removesuffix(b"\n"),
            n_ctx=ctx,
            n_batch=_batched(ctx),
            chunks=chunks,
            save_logits=SaveLogits(out, chosen, overwrite=True),
            progress=lambda now: tell(now.chunk, now.n_chunks, f"perplexity {now.ppl.value:.4f}"),
            **places.evaluation(),
        )
        for note in found.notes:
            tell.note(note)
        return {"ppl": found.ppl.as_dict(), "chunks": found.n_chunks, "ctx": ctx, "format": chosen}

    def expected() -> Expected:
        tokens, nbytes = sized()
        return Expected(min(nbytes, _WHOLE_LOGITS), estimate.forward_seconds(model.active, tokens, places.threads))

    return Step(
        name,
        what,
        {"the model": places.source, "the text": text},
        {"chunks": chunks, "ctx": ctx, "logits": form},
        (out,),
        run,
        expected,
        whole=lambda: True,
    )
