"""Tensors that are not what they should be: the same numbers elsewhere in memory, or other memory, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import qlangevin as ql

SOUND, UNSOUND, UNSURE = "sound", "unsound", "unsure"
DTYPES = (torch.float64, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)

Corruption = Callable[[Tensor, Random], Tensor]


def misaligned(t: Tensor, rng: Random) -> Tensor:
    """Return the same numbers at an odd address."""
    if t.numel() == 0:
        return t
    memory = torch.empty(t.nbytes + 64, dtype=torch.uint8)
    there = torch.frombuffer(memory.numpy(), dtype=t.dtype, count=t.numel(), offset=1)
    return there.view(t.shape).copy_(t)


def with_offset(t: Tensor, rng: Random) -> Tensor:
    return torch.cat((t.new_zeros(3), t.reshape(-1), t.new_zeros(2)))[3:-2].view(t.shape)


def strided(t: Tensor, rng: Random) -> Tensor:
    return torch.stack((t, t), -1)[..., 0]


def expanded(t: Tensor, rng: Random) -> Tensor:
    return t[:1].expand_as(t) if t.dim() and len(t) else t


def other_size(t: Tensor, rng: Random) -> Tensor:
    flat = t.reshape(-1)
    return rng.choice((flat[:-1], flat[: t.numel() // 2], torch.cat((flat, flat)), flat[:1], flat, t.unsqueeze(0)))


def other_dtype(t: Tensor, rng: Random) -> Tensor:
    return t.to(rng.choice(DTYPES))


def freed(t: Tensor, rng: Random) -> Tensor:
    """Return a tensor whose storage is empty or too short."""
    t = t.clone()
    t.untyped_storage().resize_(rng.choice((0, t.nbytes // 2)))
    return t


def on_meta(t: Tensor, rng: Random) -> Tensor:
    return t.to("meta")


def sparse(t: Tensor, rng: Random) -> Tensor:
    return t.to_sparse() if t.dim() else t


DENSE: tuple[Corruption, ...] = (misaligned, with_offset, strided, expanded, other_size, other_dtype, freed)
ALL: tuple[Corruption, ...] = (*DENSE, on_meta, sparse)


def has_memory(t: Tensor) -> bool:
    """Return True if every element lies in the tensor's storage."""
    if t.layout is not torch.strided or t.is_meta:
        return False
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.numel() == 0 or (last + 1) * t.itemsize <= t.untyped_storage().nbytes()


def is_odd(t: Any) -> bool:
    """Return True if a tensor begins at an address that kernels do not write to."""
    return isinstance(t, Tensor) and has_memory(t) and t.data_ptr() % t.itemsize != 0


def judge(t: Tensor, before: Tensor) -> str:
    """Return SOUND for the same numbers, UNSOUND for memory that would be misread, UNSURE for another shape of it."""
    if not has_memory(t) or t.dtype != before.dtype or t.numel() != before.numel() or not t.is_contiguous():
        return UNSOUND
    return SOUND if t.shape == before.shape else UNSURE


def worst(*verdicts: str) -> str:
    return next(v for v in (UNSOUND, UNSURE, SOUND) if v in verdicts)


def corrupt(tensors: dict[str, Any], rng: Random, kinds: Sequence[Corruption] = ALL) -> str:
    """Corrupt up to two of the tensors; return the worst verdict on them."""
    names = [name for name, t in tensors.items() if isinstance(t, Tensor)]
    verdicts = [SOUND]
    for name in rng.sample(names, min(len(names), rng.choice((0, 1, 1, 2)))):
        before = tensors[name]
        tensors[name] = rng.choice(kinds)(before, rng)
        verdicts.append(judge(tensors[name], before))
    return worst(*verdicts)


def corrupt_codes(q: ql.QTensor, rng: Random) -> str:
    """Change the memory under a QTensor; return the verdict on it."""
    parts: dict[str, Any] = {"codes": q.codes, "exponents": q.exponents}
    name = rng.choice([name for name, t in parts.items() if t is not None])
    part, before = parts[name], parts[name].clone()
    match rng.randrange(4):
        case 0:
            part.untyped_storage().resize_(rng.choice((0, part.untyped_storage().nbytes() // 2)))
        case 1:
            part.set_(rng.choice((part.reshape(-1)[:1].clone(), torch.stack((part, part), -1)[..., 0])))
        case 2:
            verdict = corrupt(parts, rng, DENSE)
            q.codes, q.exponents = parts["codes"], parts["exponents"]
            return verdict
        case _:
            return SOUND
    return judge(part, before)
