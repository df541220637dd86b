"""The demo: what rounding does to a posterior, what the correction repairs, and what a posterior adds, on one page."""

from .run import DemoResult, DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
