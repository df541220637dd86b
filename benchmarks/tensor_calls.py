"""Calls with adversarial tensors, for `benchmarks.kernel_fuzz`: of `qlangevin.native`, PyTorch's operators and QTensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin import native
from qlangevin.distributed.qshard import QShard
from qlangevin.quantization import qtensor
from qlangevin.quantization.codes import pack_codes
from qlangevin.quantization.formats import FP32
from qlangevin.quantization.operators import key_bits
from qlangevin.sampling.step import StepSettings, TensorStep, step_tensors, update

from .kernel_calls import COMPUTED, NAMES, REFUSED, ROUNDINGS, Case, attempt, expect, randomize_codes, same

# ---- tensors that are not what they should be


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
    return t.reshape(-1)[:1].expand(t.numel()).view(t.shape) if t.numel() and t.dim() == 1 else t[:1].expand_as(t) if t.dim() and len(t) else t


def other_size(t: Tensor, rng: Random) -> Tensor:
    flat = t.reshape(-1)
    return rng.choice((flat[:-1], flat[: t.numel() // 2], torch.cat((flat, flat)), flat[:1], flat, t.unsqueeze(0)))


def other_dtype(t: Tensor, rng: Random) -> Tensor:
    return t.to(rng.choice((torch.float64, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)))


def freed(t: Tensor, rng: Random) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(rng.choice((0, t.nbytes // 2)))
    return t


def on_meta(t: Tensor, rng: Random) -> Tensor:
    return t.to("meta")


def sparse(t: Tensor, rng: Random) -> Tensor:
    return t.to_sparse() if t.dim() else t


CORRUPTIONS: tuple[Callable[[Tensor, Random], Tensor], ...] = (
    misaligned, with_offset, strided, expanded, other_size, other_dtype, freed, on_meta, sparse,
)  # fmt: skip


def has_memory(t: Tensor) -> bool:
    """Return True if every element lies in the tensor's storage."""
    if t.layout is not torch.strided or t.is_meta:
        return False
    if t.numel() == 0:
        return True
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize <= t.untyped_storage().nbytes()


def is_sound(t: Any, like: Tensor) -> bool:
    return (
        isinstance(t, Tensor) and t.dtype == like.dtype and t.shape == like.shape and has_memory(t) and t.is_contiguous()
    )  # fmt: skip


def corrupt(tensors: dict[str, Any], rng: Random) -> bool:
    """Corrupt one or two of the tensors; return True if all are still what they were, if only elsewhere in memory."""
    names = [name for name, t in tensors.items() if isinstance(t, Tensor)]
    good = True
    for name in rng.sample(names, min(len(names), rng.choice((0, 1, 1, 2)))):
        before = tensors[name]
        tensors[name] = rng.choice(CORRUPTIONS)(before, rng) if rng.random() < 0.95 else None
        good = good and is_sound(tensors[name], before)
    return good


# ---- the functions of qlangevin.native


def native_call(rng: Random) -> str:
    case = Case.draw(rng)
    name = rng.choice(("quantize", "quantize_with_codes", "encode", "decode", "relu_with_codes", "encode_exactly", "first_not_finite"))
    codes, exponents = case.coded()
    if name == "decode" and rng.random() < 0.3:
        randomize_codes(codes, exponents, rng)
    x, kept = case.x.clone(), (codes.clone(), exponents.clone())
    t: dict[str, Any] = {"x": x, "codes": codes, "exponents": exponents, "out": torch.empty(case.shape)}
    good = corrupt(t, rng)
    to_code = (case.x if name == "encode_exactly" else case.format.decode(*kept)) if case.x.dim() else case.x
    f, key, number = case.format, case.key, case.purpose
    calls: dict[str, Callable[[], Any]] = {
        "quantize": lambda: native.quantize(t["x"], f, case.rounding, key, number, torch.tensor(case.variance), out=t["out"]),
        "quantize_with_codes": lambda: native.quantize_with_codes(t["x"], f, case.rounding, key, number, (t["codes"], t["exponents"])),
        "encode": lambda: native.encode(t["x"], t["codes"], t["exponents"], f),
        "decode": lambda: native.decode(t["out"], t["codes"], t["exponents"], f),
        "relu_with_codes": lambda: native.relu_with_codes(t["x"], t["out"], t["codes"], t["exponents"], f),
        "encode_exactly": lambda: native.encode_exactly(t["x"], t["codes"], t["exponents"], f),
        "first_not_finite": lambda: native.first_not_finite([t["x"], case.x]),
    }  # fmt: skip
    if any(u is None for u in t.values()) or (f == FP32 and name != "quantize" and not good):
        return REFUSED  # a caller's slip that mypy finds; FP32 has no kernel for codes
    fine, result = attempt(calls[name])
    if not fine:
        uses_codes = f == FP32 and name in ("quantize_with_codes", "relu_with_codes", "encode_exactly")
        elsewhere = any(isinstance(u, Tensor) and has_memory(u) and u.data_ptr() % u.itemsize for u in t.values())
        expect(not good or elsewhere or uses_codes, f"a sound {name} was refused: {result}")
        return REFUSED
    if name == "quantize" and good:
        expect(same(t["out"].clone(), case.quantized(case.x)), f"{case} differs")
    if name == "decode" and good:
        expect(same(t["out"].clone(), f.decode(*kept) if codes.dim() else f.decode(kept[0].view(1), kept[1]).view(())), f"{f} decodes differently")
    del to_code
    return COMPUTED


# ---- PyTorch's operators


def operator_call(rng: Random) -> str:
    """Call an operator on both paths: they must both refuse it or agree."""
    case, ops = Case.draw(rng), torch.ops.qlangevin
    codes, exponents = case.coded()
    format = str(case.format) if rng.random() < 0.9 else rng.choice((*NAMES, "bfp99", "", "fixed8", "e9m9", "x" * 50))
    t: dict[str, Any] = {"x": case.x.clone(), "codes": codes, "exponents": exponents, "variance": torch.rand(case.shape)}
    corrupt(t, rng)
    key, name = key_bits(case.key), rng.choice(("quantize", "corrected", "encode", "decode"))
    calls: dict[str, Callable[[], Any]] = {
        "quantize": lambda: ops.quantize(t["x"], format, rng_rounding, *key, case.purpose),
        "corrected": lambda: ops.corrected(t["x"], t["variance"], format, "exact", *key),
        "encode": lambda: ops.encode(t["x"], format),
        "decode": lambda: ops.decode(t["codes"], t["exponents"], format),
    }
    rng_rounding = rng.choice(("nearest", "stochastic", "stochastic", "bogus"))
    needed = {"decode": "codes", "corrected": "variance"}.get(name, "x")
    if t["x"] is None or t[needed] is None or any(u.is_meta or u.layout is not torch.strided for u in t.values() if u is not None):
        return REFUSED  # PyTorch has no such operator for these and says so
    fine, result = attempt(calls[name])
    with native.disabled():
        also, expected = attempt(calls[name])
    expect(fine == also, f"{name} {format}: one path refuses, {result if not fine else expected}")
    if not fine:
        return REFUSED
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, expected)), strict=True):
        equal = torch.equal(a, b) if a.dtype not in (torch.float32,) else same(a, b)
        expect(equal or bool(a.double().isnan().any()), f"{name} of {format}: the paths differ")
    return COMPUTED


# ---- QTensors


def use(q: ql.QTensor, rng: Random) -> Any:
    """Do something with a QTensor; return what it stands for, or None."""
    target = ql.encode(torch.zeros(q.base_shape), q.format)
    uses: tuple[Callable[[], Any], ...] = (
        q.decode, lambda: q + 0.0, lambda: q.clone().decode(), lambda: q.detach().decode(), lambda: copy.deepcopy(q).decode(),
        lambda: target.copy_(q).decode(), lambda: nothing(q.copy_(target)), lambda: nothing(q.add_(1.0)),
        lambda: save_and_load(q).decode(), lambda: nothing(q[:1].decode() if q.dim() else None),
        lambda: nothing(step(q)), lambda: QShard.from_tensor(q).decode() if q.dim() else None, lambda: nothing(q.to("meta")),
        lambda: nothing(torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), q) if q.dim() == 2 and len(q) else None),
    )  # fmt: skip
    return rng.choice(uses)()


def nothing(_: Any) -> None:
    """Forget a result."""


def save_and_load(q: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def step(q: ql.QTensor) -> bool:
    step_tensors([TensorStep(q, torch.ones(q.shape), ql.Key(0))], StepSettings(0.1, 1000))
    return True


def qtensor_call(rng: Random) -> str:
    """Make a QTensor of corrupted codes, or corrupt them afterwards, and use it."""
    case = Case.draw(rng)
    codes, exponents = case.coded()
    wild = rng.random() < 0.2
    if wild:
        randomize_codes(codes, exponents, rng)
    kept = case.format.decode(codes.view(-1) if not codes.dim() else codes, exponents).view(case.shape).clone()
    t: dict[str, Any] = {"codes": pack_codes(codes, case.format), "exponents": exponents if case.format.has_exponents else None}
    before, q = dict(t), None
    if rng.random() < 0.5:
        good = corrupt(t, rng)
        shape: Any = case.shape if rng.random() < 0.9 else rng.choice(((-1,), (2**32, 2**32), ("x",), (3,), 5, None))
        about = (t["codes"], t["exponents"], case.format, shape, torch.float32, None)
        if rng.random() < 0.5:
            made = partial(qtensor._rebuild, *about, False, False)
        else:
            made = partial(ql.QTensor, *about[:3], torch.Size(shape) if isinstance(shape, tuple) and shape != ("x",) else case.shape, torch.float32)
        fine, q = attempt(made)
        good = good and (not isinstance(shape, tuple) or tuple(shape) == tuple(case.shape))
    else:
        fine, q = attempt(lambda: ql.QTensor(t["codes"], t["exponents"], case.format, case.shape, torch.float32))
        expect(fine, f"sound codes were refused: {q}")
        good = corrupt_later(q, rng)
    if not fine:
        expect(not good or wild or shape != case.shape, f"sound codes were refused: {q}")
        return REFUSED
    if any(isinstance(p, Tensor) and (p.is_meta or p.layout is not torch.strided) for p in (q.codes, q.exponents)):
        return REFUSED
    del before
    with native.disabled() if rng.random() < 0.3 else torch.no_grad():
        fine, result = attempt(lambda: use(q, rng))
    if fine and good and not wild and isinstance(result, Tensor) and result.shape == kept.shape and not case.x.isnan().any():
        expect(same(result.detach() + 0.0, kept + 0.0), f"{case.format} {case.shape} has other numbers")
    return COMPUTED if fine else REFUSED


def corrupt_later(q: ql.QTensor, rng: Random) -> bool:
    """Change the memory under a QTensor; return True if nothing was changed."""
    part = q.exponents if q.exponents is not None and rng.random() < 0.5 else q.codes
    match rng.randrange(4):
        case 0:
            part.untyped_storage().resize_(rng.choice((0, part.untyped_storage().nbytes() // 2)))
        case 1:
            part.set_(rng.choice((part.reshape(-1)[:1].clone(), torch.stack((part, part), -1)[..., 0])))  # type: ignore[call-overload]
        case 2:
            parts: dict[str, Any] = {"codes": q.codes, "exponents": q.exponents}
            corrupt(parts, rng)
            q.codes, q.exponents = parts["codes"] if parts["codes"] is not None else q.codes, parts["exponents"]
        case _:
            return True
    return False


def step_call(rng: Random) -> str:
    """Step plain or packed tensors, some corrupted, by `native.sgld`; a sound step must be that of `update`."""
    case = Case.draw(rng)
    rounding: Any = rng.choice(ROUNDINGS)
    values = case.quantized(case.x.nan_to_num(0.0, 1.0, -1.0)) if case.format != FP32 else case.x.nan_to_num(0.0, 1.0, -1.0)
    theta: Any = ql.encode(values, case.format) if rng.random() < 0.5 and case.format.storage_bits > 4 else ql.quantize(values, case.format)
    before = theta.clone()
    t: dict[str, Any] = {"gradient": torch.randn(case.shape)}
    if not isinstance(theta, ql.QTensor):
        t["theta"] = theta
    kept = t["gradient"].clone()
    good = corrupt(t, rng)
    theta = t.get("theta", theta)
    if t["gradient"] is None or theta is None:
        return REFUSED
    if isinstance(theta, ql.QTensor) and rng.random() < 0.3:
        good = corrupt_later(theta, rng) and good
    settings = StepSettings(0.1, 1000, weight_decay=1e-3, weights=str(case.format), gradients=rng.choice(("bfp8", None)), rounding=rounding)
    gradients = ql.parse(settings.gradients) if settings.gradients else None
    fine, error = attempt(
        lambda: native.sgld(
            [TensorStep(theta, t["gradient"], case.key)], weights=case.format, gradients=gradients, accumulator=None,
            rounding=rounding, lr=0.1, weight_decay=1e-3, variance=settings.variance, maximize=False,
        )  # fmt: skip
    )
    if not fine:
        odd = any(has_memory(u) and u.data_ptr() % 4 for u in t.values())
        expect(not good or odd, f"a sound step was refused: {error}")
        return REFUSED
    if good:
        with native.disabled():
            expected = update(before, kept, settings, str(case.format), case.key)
        expect(same(ql.quantization.qtensor.decoded(theta).clone(), expected), f"a step of {case.format} differs")
    return COMPUTED
