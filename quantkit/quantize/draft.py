"""A plan in the making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field
from quantkit.formats.imatrix import Imatrix
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.feedback import Feedback
from quantkit.pipeline.importance import Importance
from quantkit.pipeline.like import Like
from quantkit.pipeline.metadata import parse_override
from quantkit.pipeline.presets import Preset, rules_of
from quantkit.pipeline.regroup import Regrouped
from quantkit.pipeline.run import Executor
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.quantize.options import QuantizeOptions


@dataclass
class Draft:
    """A plan in the making; ``taken`` are the source's tensors as they are taken up, merged where that is asked for."""

    source: Source
    preset: Preset
    options: QuantizeOptions
    taken: Regrouped = field(init=False)
    imatrix: Imatrix | None = None
    importance: Importance | None = None
    like: Like | None = None
    feedback: Feedback | None = None
    executor: Callable[[Threads], Executor] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def overrides(self) -> dict[str, Field]:
        overrides: dict[str, Field] = {}
        for item in map(parse_override, self.options.override_kv):
            overrides.pop(item.key, None)  # as in a file, a key that is set again moves to the end
            overrides[item.key] = item
        return overrides

    def key(self, key: str) -> Any:
        """Return a metadata key's value or None; overrides count, as when llama-quantize loads the source."""
        return self.overrides[key].value if key in self.overrides else self.source.get(key)

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def adds_output(self) -> bool:
        """True if there is a second output that the source does not have."""
        return EXTRA_OUTPUT not in self.source.tensors and any(t.name == EXTRA_OUTPUT for t in self.taken.tensors)

    def original_names(self) -> dict[str, str]:
        """Return whose inputs tensors of the output have: names there, and names in the source."""
        original = {new: old for old, new in self.renamed.items()}
        if self.adds_output:  # which has the inputs of the output
            original[EXTRA_OUTPUT] = next(n for n in ("output.weight", "token_embd.weight") if n in self.renamed)
        return original

    @cached_property
    def as_ik(self) -> bool:
        """True if the file is laid out as ik_llama.cpp does: tensors and keys keep the source's order."""
        options = self.options
        return options.repack or options.unrepack or (options.rules or rules_of(self.preset)) == "ik"


def check_source(draft: Draft) -> None:
    """Refuse files that are no models: without an architecture nothing can be decided about them or load them."""
    arch = draft.key("general.architecture")
    if isinstance(arch, str) and arch:
        return
    what = "an imatrix, not a model" if draft.source.get("general.type") == "imatrix" else "not a model"
    raise FormatError(
        f"{draft.source.paths[0]}: this is {what}: it has no general.architecture; if it is a model after all, give "
        "--override-kv general.architecture=str:NAME"
    )
