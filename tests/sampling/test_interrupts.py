"""Ctrl-C at any line of a step: all of it has been done, or nothing; and a step that fails uses no random bits twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin
from qlangevin import SGLD, QTensor, native, pack
from qlangevin.sampling.interrupts import Uninterrupted

Line = tuple[str, int]  # a file of qlangevin, and a line in it
SOURCE = str(Path(qlangevin.__file__).parent) + os.sep
FILES = ("sampling", "quantization/qtensor", "native")


class Trace:
    """Counts how often each line of a step is executed; before the n-th time of one, calls ``action``."""

    def __init__(self, at: tuple[Line, int] | None = None, action: Callable[[], Any] = lambda: None) -> None:
        self.at, self.action, self.executed = at, action, Counter[Line]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename.removeprefix(SOURCE)
        if not file.startswith(FILES):
            return None
        if event == "line":
            line = (file, frame.f_lineno)
            self.executed[line] += 1
            if self.at == (line, self.executed[line]):
                self.action()
        return self

    def __enter__(self) -> Trace:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)


def fail() -> None:
    raise KeyboardInterrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def start(settings: dict[str, Any]) -> tuple[Any, SGLD]:
    """Make two groups of two parameters, packed unless ``weights`` are given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if "weights" not in settings:
        pack(model, "bfp8")
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[2].parameters()], "lr": 0.2},
    ]
    return model, SGLD(groups, 0.1, 10, **settings)


def read(model: nn.Module, sampler: SGLD) -> list[Tensor]:
    """Return copies of the weights, followed by those of the accumulators."""
    weights = [p.decode() if isinstance(p, QTensor) else p.detach().clone() for p in model.parameters()]
    states = [sampler.state[p] for p in model.parameters()]
    return weights + [state["accumulator"].clone() for state in states if "accumulator" in state]


def take_step(model: nn.Module, sampler: SGLD, trace: Trace) -> None:
    loss = model(torch.ones(5, 3)).square().sum()
    with trace:
        loss.backward()
        sampler.step()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"weights": "fixed8.4"},
    "accumulator": {"weights": "bfp8", "accumulator": "fp32"},
    "packed, accumulator": {"accumulator": "fp32"},
    "in backward": {"step_in_backward": True},
}
cases = pytest.mark.parametrize(
    ("name", "kernels"),
    [("plain", True), ("accumulator", False), ("packed, accumulator", False), ("in backward", True)],
)


def interrupted_runs(settings: dict[str, Any], action: Callable[[], Any]) -> tuple[list[Any], list[tuple[Any, SGLD]]]:
    """Return the numbers before and after a step, and the runs interrupted at each of its lines."""
    take_step(*start(settings), Trace())  # some lines are executed once in a process
    model, sampler = start(settings)
    before = read(model, sampler)
    take_step(model, sampler, normal := Trace())
    runs = []
    for line in normal.executed:
        if action is fail and line[0] == "sampling/interrupts.py":
            continue  # would leave its handler in place, and no Ctrl-C raises there
        runs.append(start(settings))
        with pytest.raises(KeyboardInterrupt):
            take_step(*runs[-1], Trace((line, 1), action))
    return [before, read(model, sampler)], runs


@pytest.mark.slow
@cases
def test_weights_that_have_moved_are_counted(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(native, "enabled_for", lambda *tensors: False)
    (before, _), runs = interrupted_runs(SETTINGS[name], fail)
    moved = 0
    for model, sampler in runs:
        states = [sampler.state[p] for p in model.parameters()]
        for i, (old, new) in enumerate(zip(before, read(model, sampler), strict=True)):
            assert states[i % 4]["step"] == 1 or torch.equal(old, new)
            moved += not torch.equal(old, new)
        counted = [state["step"] for state in states]
        sampler.zero_grad()
        take_step(model, sampler, Trace())
        assert [state["step"] for state in states] == [n + 1 for n in counted]
    assert moved


@pytest.mark.slow
@cases
def test_ctrl_c_waits_for_the_end_of_the_step(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(native, "enabled_for", lambda *tensors: False)
    (before, after), runs = interrupted_runs(SETTINGS[name], press)
    done = set()
    for model, sampler in runs:
        steps = [sampler.state[p]["step"] for p in model.parameters()]
        done.add(tuple(steps))
        for i, (old, new, now) in enumerate(zip(before, after, read(model, sampler), strict=True)):
            assert torch.equal(now, new if steps[i % 4] else old)
        in_backward = sampler.step_in_backward
        assert all(
            (p.grad is None) >= (in_backward and bool(n)) for p, n in zip(model.parameters(), steps, strict=True)
        )
    assert {(0, 0, 0, 0), (1, 1, 1, 1)} <= done
    assert name == "in backward" or len(done) == 2  # all parameters or none


def test_ctrl_c_is_not_deferred_where_the_program_handles_it() -> None:
    seen: list[str] = []
    old = signal.signal(signal.SIGINT, lambda number, frame: seen.append("own"))
    try:
        with Uninterrupted():
            press()
            assert seen == ["own"]
    finally:
        signal.signal(signal.SIGINT, old)
    assert signal.getsignal(signal.SIGINT) is old


def test_other_threads_step_without_touching_signals() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            take_step(*start(SETTINGS["plain"]), Trace())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
