"""Calls of the system that fail: a part of what `benchmarks.faults` tries."""

from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks import faults


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="it takes Linux and a C compiler to make calls of the system fail",
)
def test_a_call_that_fails_is_explained_and_the_operation_can_be_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    code = faults.main(faults.Options(every=41))  # a prime: of each call, each error comes up somewhere
    assert code == 0, capfd.readouterr().out
