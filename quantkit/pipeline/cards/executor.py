"""CUDA cards as an executor, beside the threads of this process: the same jobs, the same bytes.

Jobs whose type has an encoder there go to the cards, in batches; the others to the threads, at the same time. A card
has some ``Slot``s, each with a thread that reads rows into pinned memory, sends them through the slot's stream, checks
what comes back and writes it; while it does so, the streams of the others copy and compute. Memory is what --max-ram
leaves after the threads, and --max-vram.

A card that fails, at whatever, or is not done long after it should be, hands its jobs on, to other cards or the
threads, and is not used again. What a job reads and writes does not depend on who runs it, so journal, resume and cache
know nothing of cards.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.core.device import DeviceHangs, abandon
from quantkit.kernels.cuda.encode.pipeline import AnyForm, largest
from quantkit.kernels.cuda.feedback.carrier import PIECE
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pipeline import FedForm, FedSlot
from quantkit.kernels.cuda.feedback.rounding import can_round
from quantkit.kernels.first_run import compile_together
from quantkit.pipeline.cards.batch import Batches, Card, Checks, Reading
from quantkit.pipeline.cards.choice import form_of, forms_of, segment_of, weightings
from quantkit.pipeline.cards.shares import Shares
from quantkit.pipeline.feedback import Shared
from quantkit.pipeline.jobs import Job, cut_jobs, job_values, worker_ram
from quantkit.pipeline.ledger import Work
from quantkit.pipeline.planned import PlannedTensor, RowSlice
from quantkit.pipeline.threads import Threads, run_together, work
from quantkit.pipeline.warm import kernel_calls
from quantkit.pipeline.work import Worker, metrics_for
from quantkit.units import format_size

#: Slots of a card: at least one that reads, one on the card, one that writes; more where CPUs are, which reading,
#: checking and writing keep busy.
LEAST, MOST = 3, 8
#: Values of a batch, if memory allows: enough that Python does not bound the fastest types.
BATCH = 1 << 24
#: With feedback, which takes longer, and more memory: several slots fill a card together.
FED_BATCH = 1 << 22
#: Of the memory of a card that is free, without --max-vram; of that, what metrics may have.
SHARE, METRICS = 0.8, 0.5


class Cards(Threads):
    """Cards by name, and ``threads`` threads for what they do not encode.

    max_vram: bytes to take of each. verify: jobs to encode again on the CPU. say: is told what the user should know.
    keeps: whether metrics stay there from one run to the next, which has more of the same work.
    """

    def __init__(
        self,
        threads: int,
        names: Sequence[str],
        *,
        max_vram: int | None = None,
        verify: int = 0,
        say: Callable[[str], None] | None = None,
        keeps: bool = False,
    ) -> None:
        #: Of each card.
        self.slots = min(MOST, max(LEAST, threads // len(names)))
        super().__init__(threads + self.slots * len(names))
        self.cpus = threads
        self._threads, self._names, self._max_vram, self._verify = threads, tuple(names), max_vram, verify
        self._say, self._lock = say, threading.Lock()
        self._lost: set[str] = set()
        #: Bytes of cards' memory that were free at first: later, some is kept for whoever asks again.
        self._free: dict[str, int] = {}
        self._kept: dict[str, Shared[DeviceMetric]] | None = {} if keeps else None
        #: Tensors that cards leave to the CPU after all, as the user knows.
        self.left: set[str] = set()

    def run(self, ledger: Work, *, measure: bool) -> None:
        """Run all jobs of a ledger, or of a part of one; on return none is under way."""
        on_cards = [(t, p, forms) for t in ledger.to_encode() for p in t.parts if (forms := forms_of(t, p))]
        values = job_values(list(ledger.plan.tensors), self.count, ledger.max_ram)
        cards = self._opened(on_cards, values, ledger) if on_cards else []
        if not cards:
            Threads(self._threads).run(ledger, measure=measure)
            return
        everything = {t.name for t, p, (form, *_) in on_cards if form.source is p.source.type and form.target is t.type}
        everything -= {t.name for t in ledger.to_encode() for p in t.parts if not forms_of(t, p)}
        compile_together(kernel_calls(ledger.to_encode(), measure, frozenset() if self._verify else everything))
        _OneRun(self, ledger, measure, cards, self._checks(ledger, values)).carry_out(self._threads)

    def say(self, text: str) -> None:
        """Tell the user; from any thread."""
        if self._say is not None:
            with self._lock:
                self._say(text)

    def lose(self, card: Card, why: BaseException) -> None:
        """Do not use a card again."""
        with self._lock:
            card.failed, card.hangs, known = True, card.hangs or isinstance(why, DeviceHangs), card.name in self._lost
            self._lost.add(card.name)
        if not known:
            reason = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
            self.say(f"{card.name} is not used any more, others do its work: {reason}")

    def end(self, cards: Sequence[Card]) -> None:
        """Give back what cards of a run have, of which nothing is under way."""
        for card in cards:
            if card.hangs:
                abandon(card.metrics)
            elif card.failed or self._kept is None:
                card.metrics.close()

    def _opened(
        self, parts: Sequence[tuple[PlannedTensor, RowSlice, tuple[AnyForm, ...]]], values: int, ledger: Work
    ) -> list[Card]:
        """Return the cards that can be used, kernels loaded."""
        forms = dict[AnyForm, set[bool]]()
        for tensor, part, some in parts:
            for form in some:
                forms.setdefault(form, set()).update(weightings(tensor, part))
        kernels = [kernel for form, weighted in forms.items() for kernel in form.kernels(weighted)]
        slots = self.slots * len(self._names)
        need = worker_ram(list(ledger.plan.tensors), values)
        ram = (ledger.max_ram - self.count * need) // slots + 12 * values
        found = []
        for name in self._names:
            card = Card(name, None)
            if name in self._lost:
                continue
            if self._kept is not None:
                card.metrics = self._kept.setdefault(name, card.metrics)
            try:
                card.device = devices.open_device(name)
                card.device.prepare(list(dict.fromkeys(kernels)))
                for form in forms:
                    form.put_tables(card.device)
                self._fit(card, list(forms), values, ram)
                found.append(card)
            except Exception as e:  # whatever a driver, a compiler and CuPy raise
                self.lose(card, e)
        return found

    def _fit(self, card: Card, forms: list[AnyForm], values: int, ram: int) -> None:
        """Choose how much goes together so that a slot has no more than ``ram`` bytes, and the card's have room."""
        free = self._free.setdefault(card.name, int(SHARE * card.device.bytes_free()))
        vram, batch = free if self._max_vram is None else min(free, self._max_vram), max(BATCH, values)
        if any(isinstance(form, FedForm) for form in forms):
            card.metrics.limit = int(METRICS * vram)
            vram, ram = vram - card.metrics.limit, ram - PIECE
        while True:

            def rows(form: AnyForm, batch: int = batch) -> int:
                most = min(batch, max(FED_BATCH, values)) if isinstance(form, FedForm) else batch
                return max(1, most // form.n)

            card.rows, card.room = rows, largest(forms, rows)
            if batch <= values or card.room.host <= ram and self.slots * card.room.device <= vram:
                break
            batch = max(values, batch // 2)
        card.slots = min(self.slots, vram // card.room.device)
        if not card.slots:
            raise ResourceError(
                f"{card.name} has no room: a job takes {format_size(card.room.device)} of its memory, "
                f"and {format_size(vram)} may be taken"
            )

    def _checks(self, ledger: Work, values: int) -> Checks:
        """Draw the jobs to be encoded again; the same ones for a plan, as far as nothing of it is done."""
        if not self._verify:
            return Checks()
        names, count = {t.name for t in ledger.to_encode()}, 0
        for at, tensor in enumerate(ledger.plan.tensors):
            if tensor.name in names and any(forms_of(tensor, p) for p in tensor.parts):
                jobs = cut_jobs(at, tensor, values)
                count += sum(form_of(tensor, tensor.parts[job.part], job.matrix) is not None for job in jobs)
        seed = int(ledger.plan.fingerprint[:8], 16)
        drawn = random.Random(seed).sample(range(count), min(self._verify, count))
        self.say(f"--verify: the CPU encodes {len(drawn)} of {count} jobs of the cards, too, drawn with seed {seed}")
        return Checks(frozenset(drawn))


class _OneRun:
    """The jobs of one ledger on cards and threads."""

    def __init__(self, executor: Cards, ledger: Work, measure: bool, cards: list[Card], checks: Checks) -> None:
        self.executor, self.ledger, self.measure, self.cards, self.checks = executor, ledger, measure, cards, checks
        self.plan = ledger.plan
        self._forms = dict[tuple[int, int, int], AnyForm | None]()
        self._metrics = metrics_for(self.plan.tensors, ledger.max_ram, executor.cpus)
        self._reading = Reading(ledger.max_ram // 2)
        self._largest = min(card.metrics.limit for card in cards)
        self._capability = min(card.device.capability for card in cards)
        self._say_why_not()
        self.shares = Shares(ledger, self._form, sum(card.slots for card in cards), checks.wanted)

    def carry_out(self, threads: int) -> None:
        """Return when all jobs are done, or the ledger has a failure."""
        on_cpu = partial(work, self.ledger, self.shares.for_thread, self._metrics, self.measure, 2 * threads)
        slots = [partial(self._serve, card) for card in self.cards for _ in range(card.slots)]
        try:
            run_together(self.ledger, [*slots, *[on_cpu] * threads])
        finally:
            self.executor.end(self.cards)
        if self.checks.wanted and not self.ledger.stop.is_set():
            self.executor.say(f"--verify: {self.checks.done} jobs have the CPU's bytes")

    def _form(self, job: Job) -> AnyForm | None:
        """Return the form of a job's rows; None for the CPU, to which also goes what the cache has."""
        if job.cached is not None and job.cached.known:
            return None
        key = job.tensor, job.part, job.matrix
        if key not in self._forms:
            tensor = self.plan.tensors[job.tensor]
            form = form_of(tensor, tensor.parts[job.part], job.matrix)
            self._forms[key] = None if form is None or self._why_not(tensor.parts[job.part], form) else form
        return self._forms[key]

    def _why_not(self, part: RowSlice, form: AnyForm) -> str | None:
        """Return why the cards of this run do not encode rows of a form; None if they do."""
        if not isinstance(form, FedForm) or part.inputs is None:
            return None
        if part.inputs.metric_bytes > self._largest:
            return "what a covariance takes has no room on the cards"
        if form.target.is_quantized and not can_round(form.target, self._capability):
            return f"error feedback for {form.target} takes more shared memory than the cards have"
        return None

    def _say_why_not(self) -> None:
        """Tell the user what cards leave to the CPU after all, once in all runs."""
        found: dict[str, set[str]] = {}
        for tensor in self.ledger.to_encode():
            for part in tensor.parts:
                for why in {why for form in forms_of(tensor, part) if (why := self._why_not(part, form))}:
                    found.setdefault(why, set()).add(tensor.name)
        for why, all_names in found.items():
            if new := sorted(all_names - self.executor.left):
                self.executor.left |= all_names
                names = new[0] if len(new) == 1 else f"{new[0]} .. ({len(new)} tensors)"
                self.executor.say(f"the CPU encodes {names}: {why}")

    def _segment(self, job: Job, form: AnyForm) -> object:
        return segment_of(self.plan.tensors[job.tensor], job, form)

    def _serve(self, card: Card) -> None:
        """Carry out batches in a slot of a card, until there are none, or the card fails."""
        try:
            slot = FedSlot(card.device.lane(), card.room)
        except Exception as e:  # fewer slots do, but none does not
            card.slots -= 1
            if not card.slots:
                self.executor.lose(card, e)
            self.shares.leave()
            return
        try:
            worker = Worker(
                self.plan.source, self.ledger.target, self._metrics, measure=self.measure, ahead=self.executor.count
            )
            batches = Batches(
                self.ledger, self.shares, self.checks, card, slot, worker, self._reading, self.executor.lose
            )
            while not card.failed and (taken := self.shares.batch(card.rows, self._segment)) is not None:
                batches.run(*taken)
        finally:
            self.shares.leave()
            slot.close(card.limit(0), card.hangs)
