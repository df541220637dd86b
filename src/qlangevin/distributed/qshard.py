"""QShard: rows of a packed tensor, which `fully_shard` (FSDP2) hands out, sends and puts together as codes.

`fully_shard` expects of a parameter that it can be split along its first dim, that a chunk can be copied into zeros of an even
size, and that it has the two methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..quantization.code_memory import packed_shape
from ..quantization.formats import Format, check_holds
from ..quantization.qtensor import QTensor

__all__ = ["QShard", "join_rows"]

aten = torch.ops.aten


class QShard(QTensor):
    """Rows of a packed tensor of shape ``full_shape``: a QTensor whose slices along dim 0 share its codes."""

    full_shape: torch.Size

    @classmethod
    def from_rows(cls, codes: Tensor, exponents: Tensor | None, like: QTensor, rows: int) -> QShard:
        """Return a number of rows with these codes and exponents, of the format and dtype of another tensor."""
        full_shape = like.full_shape if isinstance(like, QShard) else like.shape
        shape = torch.Size((rows, *full_shape[1:]))
        shard = cls(_view_codes(codes, like.format, shape), exponents, like.format, shape, like.dtype)
        shard.full_shape = full_shape
        return shard

    @classmethod
    def from_tensor(cls, q: QTensor) -> QShard:
        """Return all rows of a packed tensor, over the same codes."""
        return cls.from_rows(q.codes, q.exponents, q, q.base_shape[0])

    def row_bytes(self) -> list[Tensor]:
        """Return the codes, and the exponents if there are any, as matrices with a line for each row."""
        self.check()
        rows, row = self.base_shape[0], torch.Size((1, *self.full_shape[1:]))
        found = [self.codes.view(rows, row.numel() if self.format.storage_bits > 4 else row.numel() // 2)]
        if self.exponents is not None:
            found.append(self.exponents.view(rows, self.format.block_count(row)))
        return found

    def slice_rows(self, start: int, stop: int) -> QShard:
        """Return the rows from start to stop, over the same codes."""
        codes, *exponents = [t[start:stop].view(-1) for t in self.row_bytes()]
        return QShard.from_rows(codes, exponents[0] if exponents else None, self, stop - start)

    def padded_row_bytes(self, processes: int) -> list[Tensor]:
        """Return `row_bytes` with as many lines as the process with most rows has."""
        missing = -(-self.full_shape[0] // processes) - self.base_shape[0]
        return [nn.functional.pad(t, (0, 0, 0, missing)) if missing else t for t in self.row_bytes()]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors to send. (With more arguments in this signature PyTorch wants exponents as many as codes.)"""
        return tuple(self.padded_row_bytes(mesh.size())), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the full tensor over the memory that was received into; the next time, ``out`` is already over it."""
        if out is not None:
            return None
        check_holds(param_dtype, self.format)
        own = self.row_bytes()[len(outputs) :]  # a single process receives its codes only
        return join_rows(self, [*outputs, *own], param_dtype), []

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = NotImplemented
        if func in _HANDLERS and isinstance(args[0], QShard) and not args[0].is_view:
            result = _HANDLERS[func](*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs) if result is NotImplemented else result


def join_rows(shard: QShard, row_bytes: list[Tensor], dtype: torch.dtype) -> QTensor:
    """Return the full tensor from the `padded_row_bytes` of all its shards, one below the other."""
    codes, *exponents = [t[: shard.full_shape[0]].view(-1) for t in row_bytes]
    codes = _view_codes(codes, shard.format, shard.full_shape)
    return QTensor(codes, exponents[0] if exponents else None, shard.format, shard.full_shape, dtype)


def _view_codes(codes: Tensor, format: Format, shape: torch.Size) -> Tensor:
    """Return codes in the shape of the tensor; flat if two share a byte."""
    if codes.numel() != packed_shape(shape, format).numel():
        return codes  # which QTensor refuses
    return codes.view(shape) if format.storage_bits > 4 else codes.view(-1)


# ---- operations of `fully_shard` on a parameter


def _split(q: QShard, size: int, dim: int = 0) -> Any:
    rows = q.base_shape[0]
    return (
        [q.slice_rows(at, min(at + size, rows)) for at in range(0, rows, size)] if dim == 0 and size else NotImplemented
    )


def _slice(q: QShard, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    start, stop, _ = slice(start, end).indices(q.base_shape[0])
    return q.slice_rows(start, max(start, stop)) if dim == 0 and step == 1 else NotImplemented


def _new_zeros(q: QShard, size: list[int], **_: Any) -> Any:
    if list(size[1:]) != list(q.full_shape[1:]):
        return NotImplemented
    codes, *exponents = [t.new_zeros(size[0] * t.shape[1]) for t in q.row_bytes()]
    return QShard.from_rows(codes, exponents[0] if exponents else None, q, size[0])


_HANDLERS: dict[Any, Any] = {
    aten.detach.default: QShard.from_tensor,
    aten.alias.default: QShard.from_tensor,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new_zeros,
}
