"""Tests of the Triton kernels in Triton's interpreter, which a process must choose before triton is imported.

``TRITON_INTERPRET=1 pytest tests/gpu/interpreted`` runs them; `tests/gpu/test_bits.py` does so in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels on the CPU, in small programs: the interpreter takes as long for few elements as for many."""
    from qlangevin import gpu
    from qlangevin.gpu import launch, step

    for module in (launch, step):
        monkeypatch.setattr(module, "COUNTERS", 128)
        monkeypatch.setattr(module, "block_shape", lambda length: launch.BlockShape(4, 256, 4))
    with gpu.interpreted():
        yield
