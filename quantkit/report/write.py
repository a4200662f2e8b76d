"""``report``: measures missing numbers, writes these, the page and the card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.extras import REPORT, check_extras
from quantkit.formats.outputs import Output, atomic_write, check_apart, check_free
from quantkit.formats.remote import locate
from quantkit.progress import Progress, ProgressCallback
from quantkit.report.card import card_text
from quantkit.report.data import Report, read_data
from quantkit.report.measure import ReportOptions, measure_report
from quantkit.report.page import page_text


@checked
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
    progress: ProgressCallback | None = None,
) -> Report:
    """Write a page about quantized files of one model, and return its numbers.

    Args:
        files: GGUF files; without any, the page is made from ``data`` alone.
        out: the page, OUT.html.
        base: the unquantized GGUF file, and ``text``: held-out text to measure divergence on; as in ``options``.
        card: also write a model card, Markdown.
        data: file of the numbers; by default next to the page, OUT.json. Existing numbers of unchanged files are not
            measured again.
        overwrite: replace page and card.
        progress: called with the parts of the current step done, their total, and its description.

    Raises:
        ResourceError: an output cannot be written, or packages are not installed.
        QuantkitError: as ``inspect``, ``kld``, ``compare`` and ``bench``.
    """
    out = locate(out)
    options = options or ReportOptions()
    options = replace(
        options,
        base=options.base if base is None else locate(base),
        text=options.text if text is None else locate(text),
    )
    data_path = locate(data) if data is not None else out.with_suffix(".json")
    card = None if card is None else locate(card)
    paths = [locate(file) for file in files]
    single = (options.base, options.text, options.imatrix, options.sensitivity)
    inputs = (*paths, *options.mmproj, *options.score, *single)
    check_apart([out, data_path, card, options.logits], inputs)
    check_extras(REPORT)
    for output in (out, card):
        if output is not None:
            check_free(output, overwrite=overwrite)
    previous = read_data(data_path) if data_path.exists() else None
    if not paths and previous is None:
        raise RecipeError(f"no files to report on, and no data of an earlier report: {data_path}", "QK-E214")
    with ExitStack() as stack:
        for output in (out, data_path, card):
            if output is not None:
                stack.enter_context(Output(output, overwrite=overwrite or output == data_path))

        def save(now: Report) -> None:
            with atomic_write(data_path) as part:
                part.write_text(now.to_json())

        def report_step(step: str, current: float, total: float) -> None:
            if progress is not None:
                progress(Progress(current, total, step))

        result = measure_report(paths, options, previous, save, report_step) if paths else previous
        assert result is not None
        with atomic_write(out) as part:
            part.write_text(page_text(result), encoding="utf-8")
        if card is not None:
            with atomic_write(card) as part:
                part.write_text(card_text(result, options.base_model, options.license), encoding="utf-8")
    return result
