"""``report``: measure what is missing, keep the numbers, write the page and the card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.formats.outputs import Output, check_apart, check_free, written
from quantkit.report.card import card_text
from quantkit.report.data import Report, read_data
from quantkit.report.measure import Progress, ReportOptions, measured


def report(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    base: str | Path | None = None,
    text: str | Path | None = None,
    card: str | Path | None = None,
    data: str | Path | None = None,
    options: ReportOptions | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a page about quantized files of one model, and return its numbers.

    Args:
        files: GGUF files; without any, the page is made from ``data`` alone.
        out: the page, OUT.html.
        base: the unquantized GGUF file, and ``text``: held-out text to measure divergence on; as in ``options``.
        card: also write a model card, Markdown.
        data: where numbers are kept; by default beside the page, OUT.json. What they have, and what did not change,
            is not measured again.
        overwrite: replace page and card.
        progress: called with what is done, and chunks done and to do.

    Raises:
        ResourceError: an output cannot be written, or Vega-Lite is not installed.
        QuantkitError: as ``inspect``, ``kld``, ``compare`` and ``bench``.
    """
    out = Path(out)
    options = options or ReportOptions()
    options = replace(
        options,
        base=options.base if base is None else Path(base),
        text=options.text if text is None else Path(text),
    )
    kept_in = Path(data) if data is not None else out.with_suffix(".json")
    card = None if card is None else Path(card)
    paths = [Path(file) for file in files]
    inputs = (*paths, options.base, options.text, options.imatrix, options.sensitivity)
    check_apart([out, kept_in, card, options.logits], inputs)
    from quantkit.report.page import needed, page_text  # jinja2 and the bundle are of the extra

    needed()
    for output in (out, card):
        if output is not None:
            check_free(output, overwrite=overwrite)
    old = read_data(kept_in) if kept_in.exists() else None
    if not paths and old is None:
        raise RecipeError(f"there are no files to report on, and no numbers of an earlier report: {kept_in}")
    with ExitStack() as stack:
        for output in (out, kept_in, card):
            if output is not None:
                stack.enter_context(Output(output, overwrite=overwrite or output == kept_in))

        def keep(now: Report) -> None:
            with written(kept_in) as part:
                part.write_text(now.to_json())

        made = measured(paths, options, old, keep, progress or _quiet) if paths else old
        assert made is not None
        with written(out) as part:
            part.write_text(page_text(made), encoding="utf-8")
        if card is not None:
            with written(card) as part:
                part.write_text(card_text(made), encoding="utf-8")
    return made


def _quiet(what: str, done: int, todo: int) -> None:
    """Show nothing."""
