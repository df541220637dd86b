"""Chains on several processes: the same draws as on one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qlangevin as ql
from qlangevin.distributed.ranks import ALONE, Ranks
from tests.helpers.learning import HALF_SQUARE, regression
from tests.helpers.process_groups import run_on_ranks, try_on_ranks

SETTINGS: dict[str, Any] = {"lr": 1e-3, "localization": 5.0, "chains": 3, "draws": 20, "weights": "bfp8"}
pytestmark = pytest.mark.distributed


def estimate(ranks: Ranks, store: str | None) -> list[list[float]]:
    model, loader = regression()
    with warnings.catch_warnings():  # ranks do not know of pytest's filters
        warnings.simplefilter("ignore", ql.QLangevinWarning)
        found: list[list[float]] = ql.slt.llc(model, loader, HALF_SQUARE, store=store, **SETTINGS).losses.tolist()
    return found


def test_ranks_share_the_chains(tmp_path: Path) -> None:
    alone = estimate(ALONE, None)
    for found in run_on_ranks(estimate, 2, str(tmp_path / "store")):
        assert np.array_equal(found, alone)


def test_ranks_need_a_store() -> None:
    outcomes = try_on_ranks(estimate, 2, None)
    refused = [outcome for outcome in outcomes if outcome.error == "ValueError"]
    assert refused
    assert all("need a store" in outcome.message for outcome in refused)
    # A rank that is late may find that the other one has ended before it gets to refuse.
    assert {outcome.error for outcome in outcomes} <= {"ValueError", "MissingRankError"}
