"""Tables on a device that is not the CPU: uploaded once for each stream, and kept for CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qlangevin import Key, parse
from qlangevin.gpu import tables
from qlangevin.gpu.step_kernels import Row

ROW = (1, 2, 3)


class Elsewhere:
    """A device with streams of its own, whose memory is the CPU's."""

    type = "cuda"

    def __init__(self) -> None:
        self.stream = 0

    def current_stream(self, device: Any) -> Any:
        return SimpleNamespace(stream_id=self.stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    elsewhere = Elsewhere()
    empty = torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda device: elsewhere)
    monkeypatch.setattr(torch, "empty_like", lambda t, device, pin_memory: t.new_empty(t.shape))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, value in (("_uploaded", type(tables._uploaded)()), ("_captured", []), ("_spare", {})):
        monkeypatch.setattr(tables, name, value)
    monkeypatch.setattr(tables, "is_capturing", lambda device: False)
    return elsewhere


def upload(device: Elsewhere, *rows: tuple[int, ...]) -> torch.Tensor:
    return tables._upload(rows, device)  # type: ignore[arg-type]


def test_a_table_is_uploaded_once_for_each_stream(device: Elsewhere) -> None:
    first = upload(device, ROW)
    assert first.tolist() == [list(ROW)]
    assert upload(device, ROW) is first
    device.stream = 1
    assert upload(device, ROW) is not first


def test_a_capture_keeps_what_it_reads_and_nobody_else_gets_it(
    device: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = upload(device, ROW)
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)
    new = upload(device, ROW)
    assert new.tolist() == [list(ROW)]
    assert new is not known
    assert [t.tolist() for t in tables._captured] == [
        [list(ROW)],
        [list(ROW)],
    ]  # also the memory that it is copied from
    monkeypatch.setattr(tables, "is_capturing", lambda device: False)
    assert upload(device, ROW) is known


def test_memory_is_set_aside_for_captures(device: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(device, ROW)
    for _ in range(3):  # captures, with a step before each
        upload(device, ROW)
        monkeypatch.setattr(tables, "is_capturing", lambda device: True)
        for i in range(1 + tables.SPARE):
            upload(device, (i, 0, 0))
        with pytest.raises(RuntimeError, match="take one more step of the same kind before each capture"):
            upload(device, ROW)
        monkeypatch.setattr(tables, "is_capturing", lambda device: False)


def test_a_row_has_addresses_sizes_and_grids() -> None:
    x = torch.zeros(4, 64, dtype=torch.int8)
    table = tables.make_table([tables.Item(x, Key(1, 2, 3), parse("bfp8"), x.shape)] * 2, [3, 5])
    row = dict(zip(Row, table.rows[1].tolist(), strict=False))
    assert (table.tensors, table.programs, table.rows.shape) == (2, 8, (2, Row.WIDTH))
    assert row[Row.X] == x.data_ptr()
    assert (row[Row.FIRST], row[Row.NUMEL], row[Row.BLOCKS], row[Row.STEP]) == (
        3,
        256,
        4,
        3,
    )
    assert table.rows[1, Row.GRID :][:3].tolist() == [6, -134, 121]
