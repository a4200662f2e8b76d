"""Edit the metadata of a GGUF file: ``quantkit edit``."""

from __future__ import annotations

from quantkit.edit.plan import EditPlan, Method, plan_edit
from quantkit.edit.run import edit, run_edit
from quantkit.options.edit import EditOptions, ValueText

__all__ = ["EditOptions", "EditPlan", "Method", "ValueText", "edit", "plan_edit", "run_edit"]
