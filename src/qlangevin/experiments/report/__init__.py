"""Reports of saved results: read, summarize, judge, draw, and lay out as a page."""

from .build import Lead, write_report
from .claims import claims
from .results import load_results

__all__ = ["Lead", "claims", "load_results", "write_report"]
