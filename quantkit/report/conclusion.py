"""Conclusions of a report: differences of KL divergence whose 95 % intervals do not overlap.

Perplexity permits no conclusion: on one text a damaged model can have a lower one than its base, by chance or by bias.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.data import File, Quality

#: Meaning of the columns of a table of scores.
SCORE_EXPLANATION = (
    "Accuracy: the share of multiple-choice tasks answered correctly. Flips: answers that turn correct or wrong "
    "against the base model; p: McNemar's exact test; tasks needed: to detect this difference at p < 0.05 with a "
    "power of 80 %."
)


def closest_file(files: Sequence[File]) -> list[str]:
    """Return the sentence on the file closest to the base; empty if intervals overlap."""
    intervals = _divergence_intervals(files)
    if not intervals:
        return []
    best, (low, high) = min(intervals, key=lambda pair: pair[1][1])
    if not all(high < interval[0] for f, interval in intervals if f is not best):
        return []
    return [
        f"{best.name} is closest to the base: a mean KL divergence of {low:.2g} to {high:.2g} nats per token "
        "(95 % interval)."
    ]


def larger_but_worse(files: Sequence[File]) -> list[str]:
    """Return a sentence on each file that is larger than another that is closer to the base."""
    better_files = ((f, better_file(f, files)) for f in files)
    return [f"{f.name} is larger than {g.name}, but further from the base." for f, g in better_files if g is not None]


def better_file(file: File, files: Sequence[File]) -> File | None:
    """Return the smallest file that is smaller than ``file`` and closer to the base; None if intervals show none."""
    intervals = _divergence_intervals(files)
    least = next((interval[0] for f, interval in intervals if f is file), None)
    if least is None:
        return None
    better = [g for g, (_, most) in intervals if g.nbytes < file.nbytes and most < least]
    return min(better, key=lambda g: g.nbytes, default=None)


def _divergence_intervals(files: Sequence[File]) -> list[tuple[File, tuple[float, float]]]:
    """Return the files with their intervals; none unless all are measured against one base on one text."""
    intervals = [
        (f, interval) for f in files if f.quality is not None and (interval := _divergence_interval(f.quality))
    ]
    keys = {f.quality.key for f in files if f.quality is not None}
    return [] if len(intervals) < len(files) or len(files) < 2 or len(keys) > 1 else intervals


def perplexity_warning(files: Sequence[File]) -> str:
    """Return the warning that a perplexity below the base's is no gain; "" if none is below."""
    ratios = [f.quality.ppl_ratio for f in files if f.quality is not None and f.quality.ppl_ratio is not None]
    below = any(ratio.value < 1 for ratio in ratios)
    return "A perplexity below the base's is not a better result: compare by KL divergence." if below else ""


def _divergence_interval(quality: Quality) -> tuple[float, float] | None:
    """Return the 95 % interval of the divergence, in nats, widened by the error bound of the base logits."""
    if quality.kld is None or not quality.kld.error > 0:
        return None
    low, high = quality.kld.interval()
    return max(0.0, low - quality.bound), high + quality.bound
