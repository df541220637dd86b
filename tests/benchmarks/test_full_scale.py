"""The estimate of a full-scale sweep: the work of an example is counted, and less of the peak takes longer."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.full_scale import hours, work_of


def test_counts_operations_and_outputs_of_an_example() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 7))
        work = work_of(model, torch.empty(2, 3, 4, 4))
    conv, linear = 2 * 16 * 5 * 27, 2 * 80 * 7
    assert work.forward == conv + linear
    assert work.training == 2 * conv + 3 * linear  # the first layer's input has no gradient
    assert work.outputs == 80 + 80 + 80 + 7


def test_a_lower_share_of_the_peak_takes_longer_but_not_in_proportion() -> None:
    (full, runs), (part, _) = hours("A100", 1.0), hours("A100", 0.4)
    assert runs == 45
    assert full < part < 2.5 * full  # rounding and steps take the same in both
