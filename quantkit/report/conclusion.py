"""Conclusions of a report: differences of KL divergence whose 95 % intervals do not overlap.

Perplexity permits no conclusion: on one text a damaged model can have a lower one than its base, by chance or by bias.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.data import File, Quality


def conclusion(files: Sequence[File]) -> list[str]:
    """Return sentences: the file closest to the base, and files that are larger than a closer one.

    The list is empty unless all files are measured against one base on one text.
    """
    intervals = [
        (f, interval) for f in files if f.quality is not None and (interval := _divergence_interval(f.quality))
    ]
    keys = {f.quality.key for f in files if f.quality is not None}
    if len(intervals) < len(files) or len(files) < 2 or len(keys) > 1:
        return []
    best, (low, high) = min(intervals, key=lambda pair: pair[1][1])
    sentences = []
    if all(high < interval[0] for f, interval in intervals if f is not best):
        sentences.append(
            f"{best.name} is closest to the base: a mean KL divergence of {low:.2g} to {high:.2g} nats per token "
            "(95 % interval)."
        )
    for f, (least, _) in intervals:
        better = [g for g, (_, most) in intervals if g.nbytes < f.nbytes and most < least]
        if better:
            smallest = min(better, key=lambda g: g.nbytes)
            sentences.append(f"{f.name} is larger than {smallest.name}, and further from the base.")
    return sentences


def perplexity_warning(files: Sequence[File]) -> str:
    """Return the warning that a perplexity below the base's is no gain; "" if none is below."""
    ratios = [f.quality.ppl_ratio for f in files if f.quality is not None and f.quality.ppl_ratio is not None]
    below = any(ratio.value < 1 for ratio in ratios)
    return "A perplexity below the base's is no gain: compare by KL divergence." if below else ""


def _divergence_interval(quality: Quality) -> tuple[float, float] | None:
    """Return the 95 % interval of the divergence, in nats, widened by the error bound of the base logits."""
    if quality.kld is None or not quality.kld.error > 0:
        return None
    low, high = quality.kld.interval()
    return max(0.0, low - quality.bound), high + quality.bound
