"""From saved results to a report: read, summarize, judge, draw, and set as a page. `experiments.report` is the way in."""
