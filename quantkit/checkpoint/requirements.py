"""The optional packages that a checkpoint on this machine needs, by a look at its files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from quantkit.checkpoint.config import optional_json
from quantkit.errors import QuantkitError
from quantkit.extras import MODEL_CARD, PRE_TOKENIZER, Extra


def checkpoint_extras(folder: Path, *, has_pre: bool = False) -> tuple[Extra, ...]:
    """Return the extras that converting the checkpoint in ``folder`` needs; ``has_pre``: its pre-tokenizer is given.

    Files that cannot be read are left to the conversion, which names them.
    """
    extras: list[Extra] = []
    with suppress(OSError), (folder / "README.md").open("rb") as card:
        extras += [MODEL_CARD] if card.readline().strip() == b"---" else []
    with suppress(OSError, QuantkitError):
        model = (optional_json(folder / "tokenizer.json") or {}).get("model")
        is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
        extras += [PRE_TOKENIZER] if is_bpe and not has_pre else []
    return tuple(extras)
