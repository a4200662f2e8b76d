"""An executor on GPUs and the threads of this process: the same jobs, the same bytes.

Jobs whose type has a CUDA encoder go to the GPUs in batches; the threads run the others at the same time. A GPU has
several slots, each with a thread that reads rows into pinned memory, sends them through the slot's stream, checks the
result and writes it; meanwhile the streams of other slots copy and compute. Host memory is the part of --max-ram that
the threads leave, GPU memory is --max-vram.

A GPU that fails in any way, or does not finish in time, returns its jobs to other GPUs or the threads, and is not used
again. The bytes of a job do not depend on where it runs, so journal, resume and cache are independent of GPUs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.core.device import DeviceHangs, abandon
from quantkit.kernels.cuda.encode.pipeline import Conversion, largest
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pinned_transfer import PIECE
from quantkit.kernels.cuda.feedback.pipeline import FeedbackConversion, FeedbackSlot
from quantkit.kernels.cuda.feedback.rounding import can_round
from quantkit.kernels.first_run import compile_in_order
from quantkit.pipeline.feedback import MetricPool
from quantkit.pipeline.gpu.batch import BatchRunner, Gpu, ReadBudget, Verification
from quantkit.pipeline.gpu.choice import conversion_of, conversions_of, segment_of, weightings
from quantkit.pipeline.gpu.queues import JobQueues
from quantkit.pipeline.jobs import Job, cut_jobs, job_values, worker_ram
from quantkit.pipeline.ledger import Work
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.pipeline.threads import Threads, run_jobs, run_parallel
from quantkit.pipeline.warmup import kernel_calls
from quantkit.pipeline.worker import Worker, metrics_for
from quantkit.units import format_size

#: Slots of a GPU: at least one that reads, one that computes, one that writes; more where there are CPUs to read, check
#: and write.
MIN_SLOTS, MAX_SLOTS = 3, 8
#: Values of a batch, if memory allows: enough that Python does not bound the fastest types.
BATCH = 1 << 24
#: The same with feedback, which needs more time and memory: several slots together fill a GPU.
FEEDBACK_BATCH = 1 << 22
#: Share of the free GPU memory that is used without --max-vram; share of that for metrics.
VRAM_SHARE, METRICS_SHARE = 0.8, 0.5


class GpuExecutor(Threads):
    """GPUs by name, and ``threads`` threads for jobs that GPUs do not encode.

    max_vram: bytes per GPU. verify: jobs to encode again on the CPU. say: is called with notes for the user.
    keep_metrics: whether metrics remain on the GPUs between runs of the same work.
    """

    def __init__(
        self,
        threads: int,
        names: Sequence[str],
        *,
        max_vram: int | None = None,
        verify: int = 0,
        say: Callable[[str], None] | None = None,
        keep_metrics: bool = False,
    ) -> None:
        #: Slots of each GPU.
        self.slots = min(MAX_SLOTS, max(MIN_SLOTS, threads // len(names)))
        super().__init__(threads + self.slots * len(names))
        self.cpus = threads
        self._threads = threads
        self._names = tuple(names)
        self._max_vram = max_vram
        self._verify = verify
        self._say, self._lock = say, threading.Lock()
        self._disabled: set[str] = set()
        #: Free bytes of each GPU at first; later some are held for reuse.
        self._free: dict[str, int] = {}
        self._metrics: dict[str, MetricPool[DeviceMetric]] | None = {} if keep_metrics else None
        #: Tensors already reported as encoded by the CPU.
        self.cpu_tensors: set[str] = set()

    def run(self, ledger: Work, *, measure: bool) -> None:
        """Run all jobs of a ledger, or of a part of one; no job is in flight on return."""
        tensors = ledger.to_encode()
        gpu_parts = [(t, p, forms) for t in tensors for p in t.parts if (forms := conversions_of(p))]
        values = job_values(list(ledger.plan.tensors), self.count, ledger.max_ram)
        gpus = self._open_gpus(gpu_parts, values, ledger) if gpu_parts else []
        if not gpus:
            Threads(self._threads).run(ledger, measure=measure)
            return
        gpu_only = {t.name for t, p, (form, *_) in gpu_parts if form.source is p.source.type and form.target is t.type}
        gpu_only -= {t.name for t in tensors for p in t.parts if not conversions_of(p)}
        compile_in_order(kernel_calls(tensors, measure, frozenset() if self._verify else gpu_only))
        _GpuRun(self, ledger, measure, gpus, self._draw_verification(ledger, values)).carry_out(self._threads)

    def say(self, text: str) -> None:
        """Show a note to the user; from any thread."""
        if self._say is not None:
            with self._lock:
                self._say(text)

    def disable(self, gpu: Gpu, error: BaseException) -> None:
        """Stop using a GPU."""
        with self._lock:
            gpu.disabled = True
            gpu.hangs = gpu.hangs or isinstance(error, DeviceHangs)
            already_disabled = gpu.name in self._disabled
            self._disabled.add(gpu.name)
        if not already_disabled:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.say(f"{gpu.name} is no longer used; the other devices take over its work: {reason}")

    def release(self, gpus: Sequence[Gpu]) -> None:
        """Release the memory of GPUs without work in flight."""
        for gpu in gpus:
            if gpu.hangs:
                abandon(gpu.metrics)
            elif gpu.disabled or self._metrics is None:
                gpu.metrics.close()

    def _open_gpus(
        self, parts: Sequence[tuple[PlannedTensor, PlannedPart, tuple[Conversion, ...]]], values: int, ledger: Work
    ) -> list[Gpu]:
        """Return the usable GPUs, kernels loaded."""
        forms = dict[Conversion, set[bool]]()
        for _, part, conversions in parts:
            for form in conversions:
                forms.setdefault(form, set()).update(weightings(part))
        kernels = [kernel for form, weighted in forms.items() for kernel in form.kernels(weighted)]
        slots = self.slots * len(self._names)
        need = worker_ram(list(ledger.plan.tensors), values)
        ram = (ledger.max_ram - self.count * need) // slots + 12 * values
        gpus = []
        for name in self._names:
            gpu = Gpu(name, None)
            if name in self._disabled:
                continue
            if self._metrics is not None:
                gpu.metrics = self._metrics.setdefault(name, gpu.metrics)
            try:
                gpu.device = devices.open_device(name)
                gpu.device.prepare(list(dict.fromkeys(kernels)))
                for form in forms:
                    form.put_tables(gpu.device)
                self._size_batches(gpu, list(forms), values, ram)
                gpus.append(gpu)
            except Exception as e:  # any error of a driver, a compiler or CuPy
                self.disable(gpu, e)
        return gpus

    def _size_batches(self, gpu: Gpu, forms: list[Conversion], values: int, ram: int) -> None:
        """Choose the batch size so that a slot takes at most ``ram`` bytes, and the slots fit into GPU memory."""
        free = self._free.setdefault(gpu.name, int(VRAM_SHARE * gpu.device.bytes_free()))
        vram, batch = free if self._max_vram is None else min(free, self._max_vram), max(BATCH, values)
        if any(isinstance(form, FeedbackConversion) for form in forms):
            gpu.metrics.limit = int(METRICS_SHARE * vram)
            vram, ram = vram - gpu.metrics.limit, ram - PIECE
        while True:

            def rows(form: Conversion, batch: int = batch) -> int:
                limit = min(batch, max(FEEDBACK_BATCH, values)) if isinstance(form, FeedbackConversion) else batch
                return max(1, limit // form.n)

            gpu.rows, gpu.slot_memory = rows, largest(forms, rows)
            if batch <= values or gpu.slot_memory.host <= ram and self.slots * gpu.slot_memory.device <= vram:
                break
            batch = max(values, batch // 2)
        gpu.slots = min(self.slots, vram // gpu.slot_memory.device)
        if not gpu.slots:
            raise ResourceError(
                f"{gpu.name} has too little memory: a job needs {format_size(gpu.slot_memory.device)}, but only "
                f"{format_size(vram)} may be used",
                "QK-E407",
            )

    def _draw_verification(self, ledger: Work, values: int) -> Verification:
        """Choose the jobs to be encoded twice; the same for each run of a plan from its beginning."""
        if not self._verify:
            return Verification()
        names, count = {t.name for t in ledger.to_encode()}, 0
        for index, tensor in enumerate(ledger.plan.tensors):
            if tensor.name in names and any(map(conversions_of, tensor.parts)):
                jobs = cut_jobs(index, tensor, values)
                count += sum(conversion_of(tensor.parts[job.part], job.matrix) is not None for job in jobs)
        seed = int(ledger.plan.fingerprint[:8], 16)
        sample = random.Random(seed).sample(range(count), min(self._verify, count))
        self.say(f"--verify: the CPU also encodes {len(sample)} of the {count} GPU jobs, sampled with seed {seed}")
        return Verification(frozenset(sample))


class _GpuRun:
    """The jobs of one ledger on GPUs and threads."""

    def __init__(
        self, executor: GpuExecutor, ledger: Work, measure: bool, gpus: list[Gpu], verification: Verification
    ) -> None:
        self.executor = executor
        self.ledger = ledger
        self.measure = measure
        self.gpus = gpus
        self.verification = verification
        self.plan = ledger.plan
        self._forms = dict[tuple[int, int, int], Conversion | None]()
        self._metrics = metrics_for(self.plan.tensors, ledger.max_ram, executor.cpus)
        self._read_budget = ReadBudget(ledger.max_ram // 2)
        self._metric_limit = min(gpu.metrics.limit for gpu in gpus)
        self._capability = min(gpu.device.capability for gpu in gpus)
        self._report_cpu_tensors()
        self.queues = JobQueues(ledger, self._form, sum(gpu.slots for gpu in gpus), verification.sample)

    def carry_out(self, threads: int) -> None:
        """Return when all jobs are done, or the ledger has a failure."""
        on_cpu = partial(run_jobs, self.ledger, self.queues.next_for_cpu, self._metrics, self.measure, 2 * threads)
        slots = [partial(self._serve_slot, gpu) for gpu in self.gpus for _ in range(gpu.slots)]
        try:
            run_parallel(self.ledger, [*slots, *[on_cpu] * threads])
        finally:
            self.executor.release(self.gpus)
        if self.verification.sample and not self.ledger.stop.is_set():
            self.executor.say(f"--verify: {self.verification.count} jobs are identical to the CPU's")

    def _form(self, job: Job) -> Conversion | None:
        """Return the form of a job's rows; None for the CPU, which also takes jobs that the cache serves."""
        if job.cached is not None and job.cached.verified:
            return None
        key = job.tensor, job.part, job.matrix
        if key not in self._forms:
            part = self.plan.tensors[job.tensor].parts[job.part]
            form = conversion_of(part, job.matrix)
            self._forms[key] = None if form is None or self._cpu_reason(part, form) else form
        return self._forms[key]

    def _cpu_reason(self, part: PlannedPart, form: Conversion) -> str | None:
        """Return the reason why this run's GPUs do not encode rows of a form; None if they do."""
        if not isinstance(form, FeedbackConversion) or part.inputs is None:
            return None
        if part.inputs.metric_bytes > self._metric_limit:
            return "a covariance does not fit into GPU memory"
        if form.target.is_quantized and not can_round(form.target, self._capability):
            return f"error feedback for {form.target} needs more shared memory than the GPUs have"
        return None

    def _report_cpu_tensors(self) -> None:
        """Report the tensors that the CPU encodes instead, once over all runs."""
        tensors_by_reason: dict[str, set[str]] = {}
        for tensor in self.ledger.to_encode():
            for part in tensor.parts:
                for reason in {reason for form in conversions_of(part) if (reason := self._cpu_reason(part, form))}:
                    tensors_by_reason.setdefault(reason, set()).add(tensor.name)
        for reason, all_names in tensors_by_reason.items():
            if new := sorted(all_names - self.executor.cpu_tensors):
                self.executor.cpu_tensors |= all_names
                names = new[0] if len(new) == 1 else f"{new[0]} .. ({len(new)} tensors)"
                self.executor.say(f"the CPU encodes {names}: {reason}")

    def _segment(self, job: Job, form: Conversion) -> object:
        return segment_of(self.plan.tensors[job.tensor], job, form)

    def _serve_slot(self, gpu: Gpu) -> None:
        """Run batches in a slot of a GPU until there are none left, or the GPU fails."""
        try:
            slot = FeedbackSlot(gpu.device.new_stream(), gpu.slot_memory)
        except Exception as e:  # fewer slots suffice, but not zero
            gpu.slots -= 1
            if not gpu.slots:
                self.executor.disable(gpu, e)
            self.queues.remove_slot()
            return
        try:
            worker = Worker(
                self.plan.source, self.ledger.target, self._metrics, measure=self.measure, readahead=self.executor.count
            )
            runner = BatchRunner(
                self.ledger, self.queues, self.verification, gpu, slot, worker, self._read_budget, self.executor.disable
            )
            while not gpu.disabled and (batch := self.queues.next_batch(gpu.rows, self._segment)) is not None:
                runner.run(*batch)
        finally:
            self.queues.remove_slot()
            slot.close(gpu.limit(0), gpu.hangs)
