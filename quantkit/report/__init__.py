"""A report on quantized files that one can show: ``quantkit report``. One page without network access, and a card.

data      the numbers, as a file keeps them
measure   takes them from models, or from an earlier run
made      where a file comes from, and the command that makes it again
charts    Vega-Lite specifications
page      HTML; card: Markdown
"""

from __future__ import annotations

from quantkit.report.data import Quality, Report, quality_from, read_data
from quantkit.report.measure import SHARES, ReportOptions, quality_of
from quantkit.report.write import report

__all__ = ["SHARES", "Quality", "Report", "ReportOptions", "quality_from", "quality_of", "read_data", "report"]
