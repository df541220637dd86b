"""A short run of `benchmarks.kernel_fuzz`, without sanitizers."""

import pytest

from benchmarks.kernel_fuzz import CALLS, FAILED, OUTCOMES, fuzz
from qlangevin import native

pytestmark = pytest.mark.skipif(not native.available, reason="no compiled kernels")


def test_every_call_is_refused_or_computes_what_the_pytorch_path_does() -> None:
    results = fuzz(range(400))
    assert [r for r in results if r.outcome == FAILED] == []
    assert {(r.kind, r.outcome) for r in results} == {(kind, outcome) for kind in CALLS for outcome in OUTCOMES[:2]}
