"""Step numbers on devices: several of them share one flag, and go back together."""

import torch

from qlangevin.quantization.backend import NO_ERROR
from qlangevin.sampling.device_counts import DeviceCounts
from tests.helpers.deferred_kernels import deferred_kernels


def test_a_gradient_on_one_device_stops_the_step_on_the_other() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, torch.inf])
    with deferred_kernels() as kernels:
        one, two = (DeviceCounts(torch.device("cpu"), [5, 5, 5]) for _ in range(2))  # slots 0 and 1 on one, 2 on two
        one.begin([good, good], [0, 1])
        two.begin([bad], [2])
        one.share(two)
        two.share(one)
        assert [device.flags.tolist() for device in (one, two)] == [[2, NO_ERROR], [2, NO_ERROR]]
        for device in (one, two):
            kernels.sgld([], weights=None, gradients=None, accumulator=None, rounding="nearest", lr=0.1, weight_decay=0.0,
                variance=0.0, maximize=False, slots=[], counts=device.counts, flags=device.flags)  # fmt: skip
        assert (one.counts.tolist(), two.counts.tolist()) == ([6, 6, 5], [5, 5, 6])
        one.begin([good], [0])  # nothing
        assert one.wait() == two.wait() == 2
        for device in (one, two):
            device.undo()
            assert device.counts.tolist() == [5, 5, 5]
            assert device.wait() == NO_ERROR


def test_a_device_without_gradients_keeps_its_counts() -> None:
    with deferred_kernels():
        one, two = (DeviceCounts(torch.device("cpu"), [0, 0]) for _ in range(2))
        two.begin([torch.ones(1)], [1])
        one.begin([torch.tensor([torch.nan])], [0])  # the next step, in which the other one has nothing to do
        two.begin([], [])
        two.share(one)
        for device in (one, two):
            device.undo()
        assert (one.counts.tolist(), two.counts.tolist()) == ([0, 0], [0, 1])


def test_the_flag_is_heard_once_it_was_asked_for() -> None:
    with deferred_kernels():
        device = DeviceCounts(torch.device("cpu"), [0])
        device.ask()
        device.begin([torch.tensor([torch.nan])], [0])
        assert device.arrived() == NO_ERROR  # it was asked for before
        device.ask()
        assert device.arrived() == 0
