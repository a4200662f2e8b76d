"""Inference speed: ``quantkit bench`` (llama-bench's tests) and ``quantkit sweep-bench`` (ik_llama.cpp's).

A test is a prompt of n tokens (pp), n tokens one by one (tg), or both (pg), at some depth of the context. Each is
repeated after an untimed warm-up. Besides tokens per second, a result has the bandwidth of reading weights and cache
and the rate of multiplications, both also as shares of the device's measured peak. Tokens are random, because expert
selection is part of the work.
"""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds
from quantkit.model.cost import Cost, token_cost
from quantkit.model.engine import Model, Session, check_next_token, load
from quantkit.model.fusion import Fusion
from quantkit.model.kv_types import split_kv_type
from quantkit.model.placement import Placement
from quantkit.version import __version__


@dataclass(frozen=True)
class Test:
    """``n_prompt`` tokens at once, then ``n_gen`` one by one, after ``n_depth`` untimed tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    def __str__(self) -> str:
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Engine settings of a test."""

    n_batch: int = 2048
    n_ubatch: int = 512
    kv_type: str = "f16"
    threads: int = 0
    fused_up_gate: bool = True
    fused_moe: bool = True
    fused_qkv: bool = True
    fused_launches: bool = True
    merge_up_gate: bool = False
    mmap: bool = True
    placement: Placement = Placement()
    max_ram: int | None = None
    max_vram: int | None = None
    cublas: bool = False


#: The settings that are on or off.
SWITCHES = ("fused_up_gate", "fused_moe", "fused_qkv", "fused_launches", "merge_up_gate", "mmap")


@dataclass(frozen=True)
class Machine:
    """The devices of a test and their measured peaks: a CPU's read bandwidth and 8-bit integer rate with these threads,
    a GPU's copy bandwidth (bytes read and written) and bf16 GEMM rate; 0 where several devices share the work.
    """

    backends: str
    threads: int
    read_gb_s: float
    peak_gops: float
    peak: str = ""


@dataclass(frozen=True)
class Result:
    """The result of one test: the times of its repetitions, and the cost of a token."""

    model: str
    model_type: str
    model_size: int
    model_n_params: int
    setting: Setting
    test: Test
    test_time: str
    samples_ns: tuple[int, ...]
    cost: Cost
    machine: Machine

    @property
    def samples_ts(self) -> tuple[float, ...]:
        return tuple(self.test.n_tokens * 1e9 / ns for ns in self.samples_ns)

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def gb_s(self) -> float:
        """Gigabytes read per second while generating; 0 for prompts, which read weights once for many tokens."""
        return self.avg_ts * self.cost.bytes / 1e9 if not self.test.n_prompt else 0.0

    @property
    def bandwidth_share(self) -> float:
        return self.gb_s / self.machine.read_gb_s if self.machine.read_gb_s else 0.0

    @property
    def peak_share(self) -> float:
        """Share of the arithmetic peak; a multiply-add is two operations."""
        return self.avg_ts * 2 * self.cost.mul_adds / 1e9 / self.machine.peak_gops if self.machine.peak_gops else 0.0

    def row(self) -> dict[str, Any]:
        """Return llama-bench's fields that apply here, and quantkit's own."""
        s = self.setting
        return {
            "build_commit": __version__,
            "cpu_info": cpu_name(),
            "backends": self.machine.backends,
            "model_filename": self.model,
            "model_type": self.model_type,
            "model_size": self.model_size,
            "model_n_params": self.model_n_params,
            "n_batch": s.n_batch,
            "n_ubatch": s.n_ubatch,
            "n_threads": self.machine.threads,
            "type_k": split_kv_type(s.kv_type)[0],
            "type_v": split_kv_type(s.kv_type)[1],
            "n_gpu_layers": s.placement.gpu_layers,
            "tensor_buft_overrides": ",".join(f"{p}={d}" for p, d in s.placement.rules) or "none",
            **{name: int(getattr(s, name)) for name in SWITCHES},
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(statistics.fmean(self.samples_ns)),
            "stddev_ns": round(statistics.stdev(self.samples_ns)) if len(self.samples_ns) > 1 else 0,
            "avg_ts": self.avg_ts,
            "stddev_ts": self.stddev_ts,
            "gb_s": self.gb_s,
            "bandwidth_share": self.bandwidth_share,
            "peak_share": self.peak_share,
            "read_gb_s_of_machine": self.machine.read_gb_s,
            "peak_gops_of_machine": self.machine.peak_gops,
            "peak_of_machine": self.machine.peak,
        }


@dataclass(frozen=True)
class SweepRow:
    """A step of a sweep: a batch of ``pp`` tokens and ``tg`` single ones after ``n_kv`` tokens; seconds."""

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float

    @property
    def speed_pp(self) -> float:
        return self.pp / self.t_pp

    @property
    def speed_tg(self) -> float:
        return self.tg / self.t_tg if self.t_tg else 0.0

    def row(self) -> dict[str, Any]:
        """Return the columns of ik_llama.cpp's JSON lines."""
        return {**asdict(self), "speed_pp": self.speed_pp, "speed_tg": self.speed_tg}


@dataclass(frozen=True)
class BenchResults(Sequence[Result], HtmlTable):
    """The results of ``bench``: every test with every setting; ``notes`` on the model."""

    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Result, ...]: ...
    def __getitem__(self, index: int | slice) -> Result | tuple[Result, ...]:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def as_table(self) -> Table:
        """Return tokens per second by test, with the settings that differ between tests."""
        settings = [asdict(result.setting) for result in self.results]
        varying = [name for name in settings[0] if len({str(s[name]) for s in settings}) > 1] if settings else []
        rows = (
            (r.model, r.machine.backends, r.machine.threads, *(str(s[name]) for name in varying), str(r.test))
            + (r.avg_ts, r.stddev_ts, r.gb_s or None)
            for r, s in zip(self.results, settings, strict=True)
        )
        return table_of(", ".join(["model, backend, threads", *varying, "test, t/s, ±, GB/s"]), rows)


@dataclass(frozen=True)
class Sweep(Sequence[SweepRow], HtmlTable):
    """The result of ``sweep_bench``: a row per step of the context; ``notes`` on the model."""

    model: str
    rows: tuple[SweepRow, ...]
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> SweepRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SweepRow, ...]: ...
    def __getitem__(self, index: int | slice) -> SweepRow | tuple[SweepRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SweepRow]:
        return iter(self.rows)

    def as_table(self) -> Table:
        """Return seconds and tokens per second by step."""
        rows = ((r.pp, r.tg, r.n_kv, r.t_pp, r.speed_pp, r.t_tg, r.speed_tg) for r in self.rows)
        return table_of("PP, TG, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s", rows, self.model)


class BenchProgress(NamedTuple):
    """Progress of ``bench``: warm-ups and repetitions, the step, notes on a model, and the result of a test."""

    current: int
    total: int
    text: str
    result: Result | None = None
    notes: tuple[str, ...] = ()


class SweepProgress(NamedTuple):
    """Progress of ``sweep_bench``: steps of the context, the current one, notes on the model, and a step's row."""

    current: int
    total: int
    text: str
    row: SweepRow | None = None
    notes: tuple[str, ...] = ()


@checked
def bench(
    model: str | Path,
    tests: Sequence[Test],
    settings: Sequence[Setting] = (Setting(),),
    *,
    repetitions: int = 5,
    warmup: bool = True,
    progress: Callable[[BenchProgress], object] | None = None,
) -> BenchResults:
    """Run every test with every setting and return the results.

    Args:
        model: a GGUF file.
        tests: the tests to time.
        settings: how the model runs.
        repetitions: of each test.
        warmup: run each kind of test once, untimed.
        progress: called outside the timed work: before each warm-up and repetition, and with each result.

    Raises:
        QuantkitError: as ``quantkit.load``.
    """
    if not tests:
        raise RecipeError("nothing to measure: give -p, -n or -pg", "QK-E214")
    n_ctx = max(test.n_depth + test.n_tokens for test in tests)
    report = progress or (lambda now: None)
    results: list[Result] = []
    notes: list[str] = []
    step = itertools.count()
    total = len(settings) * len(tests) * (repetitions + warmup)
    for setting in settings:
        with _load(model, setting) as opened:
            report(BenchProgress(len(results) * (repetitions + warmup), total, "", notes=opened.notes))
            notes += opened.notes
            session = opened.session(n_ctx)
            for test in tests:
                if warmup:
                    report(BenchProgress(next(step), total, f"{test}: warm-up"))
                    _warm(session, test, setting)

                def repeat(i: int, test: Test = test) -> None:
                    report(BenchProgress(next(step), total, f"{test}: {i + 1} of {repetitions}"))

                result = _measure(session, test, setting, repetitions, repeat)
                results.append(result)
                report(BenchProgress(len(results) * (repetitions + warmup), total, str(test), result))
    return BenchResults(tuple(results), tuple(dict.fromkeys(notes)))


def combinations(**values: Sequence[Any]) -> list[Setting]:
    """Return a setting for every combination of values, the last varying fastest."""
    return [
        Setting(**dict(zip(values, combination, strict=True))) for combination in itertools.product(*values.values())
    ]


@checked
def sweep_bench(
    model: str | Path,
    n_ctx: int,
    setting: Setting = Setting(),  # noqa: B008 - frozen
    *,
    n_gen: int | None = None,
    repetitions: int = 1,
    progress: Callable[[SweepProgress], object] | None = None,
) -> Sweep:
    """Fill a context step by step, timing a batch and single tokens at each step.

    Args:
        model: a GGUF file.
        n_ctx: tokens of the context.
        setting: how the model runs; ``n_ubatch`` is the step.
        n_gen: single tokens per step; None: a quarter of the step.
        repetitions: of the first step; the median counts.
        progress: called outside the timed work: before each step, and with its row.

    Raises RecipeError for a context that is too small; errors of ``quantkit.load``.
    """
    step = setting.n_ubatch
    single = step // 4 if n_gen is None else n_gen
    if n_ctx < step + single:
        raise RecipeError(
            f"a context of {n_ctx} tokens is too small for {step} and {single}: give a larger -c", "QK-E203"
        )
    report = progress or (lambda now: None)
    depths = range(0, n_ctx - step - single + 1, step)
    rows: list[SweepRow] = []
    with _load(model, setting) as opened:
        report(SweepProgress(0, len(depths), "warm-up", notes=opened.notes))
        session = opened.session(n_ctx)
        tokens = _tokens(opened, n_ctx)
        _warm(session, Test(step, 1), setting)
        for n_kv in depths:
            report(SweepProgress(len(rows), len(depths), f"{n_kv} tokens in the context"))
            t_tg, t_pp = [], []
            for _ in range(repetitions if n_kv == 0 else 1):
                _to_depth(session, tokens, n_kv, setting)
                t_tg.append(_time(lambda: _generate(session, tokens[:single])))
                _to_depth(session, tokens, n_kv, setting)
                t_pp.append(_time(lambda: _prompt(session, tokens[:step], setting)))
            rows.append(SweepRow(step, single, n_kv, statistics.median(t_pp), statistics.median(t_tg)))
            report(SweepProgress(len(rows), len(depths), f"{n_kv} tokens in the context", rows[-1]))
        return Sweep(opened.path.name, tuple(rows), opened.notes)


# ---------------------------------------------------------------- one test


def _load(model: str | Path, s: Setting) -> Model:
    loaded = load(
        model,
        threads=s.threads or None,
        n_ubatch=s.n_ubatch,
        kv_type=s.kv_type,
        fusion=Fusion(s.fused_up_gate, s.fused_moe, s.fused_qkv, s.fused_launches),
        merge_up_gate=s.merge_up_gate,
        mmap=s.mmap,
        placement=s.placement,
        max_ram=s.max_ram,
        max_vram=s.max_vram,
        cublas=s.cublas,
    )
    try:
        check_next_token(loaded)
    except TypeNotSupported:
        loaded.close()
        raise
    return loaded


def _tokens(model: Model, n: int) -> Any:
    return np.random.default_rng(1).integers(0, model.n_vocab, n).astype(np.int32)


def _measure(session: Session, test: Test, s: Setting, repetitions: int, repeat: Callable[[int], None]) -> Result:
    model = session.model
    tokens = _tokens(model, test.n_depth + test.n_tokens)
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    samples = []
    for i in range(repetitions):
        repeat(i)
        _to_depth(session, tokens, test.n_depth, s)
        samples.append(round(1e9 * _time(lambda: _run(session, tokens[test.n_depth :], test, s))))
    size = sum(t.nbytes for t in model.source.tensors.values())
    n_params = sum(int(np.prod(t.shape)) for t in model.source.tensors.values())
    cost = token_cost(model.graph, s.kv_type, test.n_depth + test.n_gen // 2)
    return Result(
        model.path.name,
        model.arch,
        size,
        n_params,
        s,
        test,
        began,
        tuple(samples),
        cost,
        machine_of(model, s.threads or available_cpus()),
    )


def _run(session: Session, tokens: Any, test: Test, s: Setting) -> None:
    if test.n_prompt:
        _prompt(session, tokens[: test.n_prompt], s)
    _generate(session, tokens[test.n_prompt :])


def _warm(session: Session, test: Test, s: Setting) -> None:
    """Compile kernels and read weights before timing starts."""
    tokens = _tokens(session.model, min(test.n_prompt, s.n_ubatch) + 1)
    session.clear()
    if test.n_prompt:
        _prompt(session, tokens[:-1][: session.limits.n_ctx], s)
        session.clear()
    if test.n_gen:
        _generate(session, tokens[-1:])
    session.clear()


def _to_depth(session: Session, tokens: Any, depth: int, s: Setting) -> None:
    """Bring the sequence to ``depth`` tokens: truncate it if possible, else start over."""
    if session.lengths[0] < depth or not session.rewind(0, depth):
        session.clear()
        if depth:
            _prompt(session, tokens[:depth], s)


def _prompt(session: Session, tokens: Any, s: Setting) -> None:
    outputs = np.zeros(len(tokens), bool)
    outputs[-1] = True
    for start in range(0, len(tokens), s.n_batch):
        session.decode(tokens[start : start + s.n_batch], outputs=outputs[start : start + s.n_batch])


def _generate(session: Session, tokens: Any) -> None:
    for token in tokens:
        session.decode(token[None] if hasattr(token, "shape") else [token])


def _time(work: Callable[[], None]) -> float:
    began = working_seconds()
    work()
    return working_seconds() - began


# ---------------------------------------------------------------- the machine


def machine_of(model: Model, threads: int) -> Machine:
    """Measure the peaks of a model's devices, once; takes about a second."""
    return machine(tuple(dict.fromkeys(segment.device for segment in model.segments)), threads)


@cache
def machine(devices: tuple[str, ...], threads: int) -> Machine:
    """Measure the peaks of one device, a GPU or the CPU with these threads; several devices are only named."""
    if devices == ("CPU",):
        from quantkit.kernels.cpu.core.peak import int8_gops, read_gb_s

        return Machine("CPU", threads, read_gb_s(threads), int8_gops(threads), "8-bit integers")
    if len(devices) == 1 and devices[0].startswith("CUDA"):
        from quantkit.kernels.cuda.core.peak import peaks

        return Machine(devices[0], threads, *peaks(devices[0]), "bf16 GEMM")
    return Machine(",".join(devices), threads, 0.0, 0.0)


@cache
def cpu_name() -> str:
    """Return the CPU's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
