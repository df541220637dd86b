"""The demo: what rounding does to a posterior, what the correction repairs, and what a posterior adds, on one page."""

from .result import DemoResult
from .run import DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
