"""The paper's experiments: configurations (`presets`), a run of one (`run`) or many (`sweep`), Figure 1, the bounds, reports."""
