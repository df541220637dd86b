"""Rows of packed tensors: cut, padded and put together again."""

from __future__ import annotations

from typing import cast

import pytest
import torch

import qlangevin as ql
from qlangevin.distributed.qshard import QShard, join_rows


@pytest.mark.parametrize("format", ["fixed8.3", "bfp8", "bfp8/4", "bfp4", "fp8_e4m3", "bfp16"])
def test_rows_of_codes_are_the_codes_of_rows(format: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 6) * torch.logspace(-2, 2, 7).view(-1, 1, 1)
    q = ql.encode(x, format)
    full = QShard.from_tensor(q)
    parts = [cast(QShard, part) for part in torch.split(full, 3)]
    assert [tuple(part.shape) for part in parts] == [(3, 3, 6), (3, 3, 6), (1, 3, 6)]
    assert torch.equal(torch.cat([part.decode() for part in parts]), q.decode())
    rows = [torch.cat(each) for each in zip(*(part.padded_row_bytes(3) for part in parts), strict=True)]
    back = join_rows(full, rows, torch.float32)
    assert torch.equal(back.decode(), q.decode())
    assert back.nbytes == q.nbytes
    parts[1].copy_(torch.zeros(3, 3, 6))  # it shares the codes of q
    assert torch.equal(q.decode()[3:6], torch.zeros(3, 3, 6))
    assert torch.equal(q.decode()[:3], parts[0].decode())
