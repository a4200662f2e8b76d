"""The events of a run as progress in bytes of its output."""

from __future__ import annotations

from collections.abc import Callable

from quantkit.pipeline.row_slices import PlannedTensor


class RunProgress:
    """An observer of a run: calls ``report`` with bytes done, their total and the current stage."""

    def __init__(
        self,
        report: Callable[[float, float, str], object],
        total: int,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.report, self.total, self.note = report, total, note
        self.position, self.stage = 0, ""

    def on_resume(self, tensors: int, nbytes: int) -> None:
        self.note(f"continues after {tensors} tensors")
        self.on_write(nbytes)

    def on_write(self, nbytes: int) -> None:
        self.position += nbytes
        self.report(self.position, self.total, self.stage)

    def on_tensor(self, tensor: PlannedTensor) -> None:
        pass

    def on_note(self, text: str) -> None:
        self.note(text)

    def on_stage(self, stage: int, stages: int, tokens: int, total: int) -> None:
        self.stage = f"stage {stage + 1} of {stages}"
        self.report(self.position, self.total, self.stage)
