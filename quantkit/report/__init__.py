"""Report on quantized files: ``quantkit report``. A page that needs no network, and a model card.

data        the numbers, as JSON
by_text     divergence on each of several texts
measure     measurement of the numbers, or reuse of those of an earlier run
provenance  origin of a file, and the command that makes it again
charts      Vega-Lite specifications
tables      the numbers of the charts
page        HTML
card        Markdown
"""

from __future__ import annotations

from quantkit.report.data import Quality, Report, read_data
from quantkit.report.measure import SHARES, ReportOptions, quality_of
from quantkit.report.write import report

__all__ = ["SHARES", "Quality", "Report", "ReportOptions", "quality_of", "read_data", "report"]
