"""One model out of tensors of several files: ``quantkit stitch``. No tensor is decoded."""

from __future__ import annotations

from quantkit.stitch.plan import plan_stitch, stitch

__all__ = ["plan_stitch", "stitch"]
