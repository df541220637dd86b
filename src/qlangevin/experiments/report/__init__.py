"""From saved results to a report: read, summarize, judge, draw, and lay out as a page; `build` is the entry point."""
