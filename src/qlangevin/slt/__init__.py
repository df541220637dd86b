"""Singular learning theory: local learning coefficients of networks, sampled in low precision.

`estimate` has `llc`; `settings` its settings and how they translate to those of the samplers; `losses` what is observed,
`selection` the weights that move, `borrowing` lends a chain the user's model, `data` feeds it, `chain` runs it, `folder` keeps
what it has drawn, `result` is what comes out.
"""

from __future__ import annotations

from .estimate import llc
from .judging import ChainLeftError
from .losses import supervised, token_losses
from .result import LLC
from .settings import Settings, default_nbeta

__all__ = ["LLC", "ChainLeftError", "Settings", "default_nbeta", "llc", "supervised", "token_losses"]
