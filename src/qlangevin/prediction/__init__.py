"""Bayesian model averaging over stored samples, metrics of predictions, and convergence diagnostics."""
