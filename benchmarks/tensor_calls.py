"""Calls with adversarial tensors, for `benchmarks.kernel_fuzz`: of `qlangevin.native`, PyTorch's operators and QTensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

import qlangevin as ql
from qlangevin import native
from qlangevin.distributed.qshard import QShard
from qlangevin.quantization import qtensor
from qlangevin.quantization.backend import TensorStep
from qlangevin.quantization.codes import pack_codes
from qlangevin.quantization.formats import FP32
from qlangevin.quantization.operators import key_bits
from qlangevin.quantization.qtensor import decoded
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import _step_by_pytorch, step_tensors

from .corrupt_tensors import ALL, DENSE, SOUND, UNSOUND, UNSURE, corrupt, corrupt_codes, is_odd, judge, worst
from .kernel_calls import COMPUTED, NAMES, REFUSED, ROUNDINGS, Case, attempt, expect, randomize_codes, same

# ---- the functions of qlangevin.native


def native_call(rng: Random) -> str:
    """Call a function of `native`: it must refuse memory that it would misread, and compute what PyTorch does of other."""
    case, f = Case.draw(rng), native
    codes, exponents = case.coded()
    x, out, coded, key = case.x.clone(), torch.empty(case.shape), {"codes": codes, "exponents": exponents}, case.key
    law = (case.rounding, key, case.purpose)
    calls: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
        "quantize": ({"x": x, "out": out}, lambda x, out: f.quantize(x, case.format, *law, torch.tensor(case.variance), out)),
        "quantize_with_codes": ({"x": x, **coded}, lambda x, **c: f.quantize_with_codes(x, case.format, *law, tuple(c.values()))),
        "encode": ({"values": x, **coded}, lambda **t: f.encode(**t, format=case.format)),
        "decode": ({"values": out, **coded}, lambda **t: f.decode(**t, format=case.format)),
        "relu_with_codes": ({"x": x, "out": out, **coded}, lambda **t: f.relu_with_codes(**t, format=case.format)),
        "encode_exactly": ({"values": x, **coded}, lambda **t: f.encode_exactly(**t, format=case.format)),
        "first_not_finite": ({"x": x}, lambda x: f.first_not_finite([x, case.x])),
    }  # fmt: skip
    name = rng.choice(list(calls))
    if case.format == FP32:  # its codes are the numbers: there is no kernel for them
        name = rng.choice(("quantize", "first_not_finite"))
    if name == "decode" and rng.random() < 0.3:
        randomize_codes(codes, exponents, rng)
    numbers = decode_plainly(case, codes.clone(), exponents.clone())
    t, call = calls[name]
    verdict = corrupt(t, rng, ALL)
    fine, result = attempt(lambda: call(**t))
    if not fine:
        expect(verdict != SOUND or any(map(is_odd, t.values())), f"a sound {name} was refused: {result}")
        return REFUSED
    if name == "first_not_finite":  # which takes any size
        expect(
            result == next((i for i, u in enumerate((t["x"], case.x)) if not u.isfinite().all()), -1),
            "it is not the first",
        )
        return COMPUTED
    expect(verdict != UNSOUND, f"{name} of {case.format} {tuple(case.shape)} took memory that it misreads")
    if name == "quantize":
        expect(same(t["out"].clone(), case.quantized(case.x)), f"{case} differs")
    if name == "decode":
        expect(same(t["values"].clone(), numbers), f"{case.format} decodes differently")
    return COMPUTED


def decode_plainly(case: Case, codes: Tensor, exponents: Tensor) -> Tensor:
    """Return what the PyTorch path decodes; a tensor without dims as one of one element."""
    return case.format.decode(codes.view(codes.shape or 1), exponents).view(case.shape)


def step_call(rng: Random) -> str:
    """Step a plain or packed tensor, with or without accumulator, by `native.sgld` and by the PyTorch path."""
    case, rounding = Case.draw(rng), rng.choice(ROUNDINGS)
    values = ql.quantize(case.x.nan_to_num(0.0, 1.0, -1.0), case.format)
    packed = rng.random() < 0.5 and case.format.storage_bits > 4
    theta: Tensor = ql.encode(values, case.format) if packed else values
    t: dict[str, Any] = {"gradient": torch.randn(case.shape)} | ({} if packed else {"theta": theta})
    if rng.random() < 0.3:
        t["accumulator"] = values.clone()
    formats = {"weights": case.format, "gradients": rng.choice((ql.parse("bfp8"), None)), "accumulator": None}
    formats["accumulator"] = ql.parse("bfp16") if "accumulator" in t else None
    names = {name: None if format is None else str(format) for name, format in formats.items()}
    s = StepSettings(0.1, 1000, weight_decay=1e-3, rounding=rounding, **names)  # type: ignore[arg-type]
    other = TensorStep(theta.clone(), t["gradient"].clone(), case.key, values.clone() if "accumulator" in t else None)
    verdict = corrupt(t, rng, DENSE)
    if (
        not packed
        and len({u.shape for u in t.values()}) == 1
        and all(judge(u, values.new_empty(u.shape)) == SOUND for u in t.values())
    ):
        verdict = SOUND if t["gradient"].shape == case.shape else UNSURE  # all have another shape, the same
    if isinstance(theta, ql.QTensor) and rng.random() < 0.3:
        verdict = worst(verdict, corrupt_codes(theta, rng))
    step = TensorStep(t.get("theta", theta), t["gradient"], case.key, t.get("accumulator"))
    settings = {"rounding": rounding, "lr": s.lr, "weight_decay": s.weight_decay, "variance": s.variance}
    fine, error = attempt(lambda: native.sgld([step], **formats, **settings, maximize=False))  # type: ignore[arg-type]
    if not fine:
        odd = any(map(is_odd, (*t.values(), getattr(theta, "codes", None))))
        expect(verdict != SOUND or odd, f"a sound step was refused: {error}")
        return REFUSED
    expect(verdict != UNSOUND, f"a step of {case.format} {tuple(case.shape)} took memory that it misreads")
    if verdict == SOUND:
        _step_by_pytorch(other, s)
        expect(same(decoded(step.theta).clone(), decoded(other.theta)), f"a step of {case.format} differs")
    return COMPUTED


# ---- PyTorch's operators


def operator_call(rng: Random) -> str:
    """Call an operator on both paths: both must refuse it, or both compute the same."""
    case, ops = Case.draw(rng), torch.ops.qlangevin
    codes, exponents = case.coded()
    format = str(case.format) if rng.random() < 0.9 else rng.choice((*NAMES, "bfp99", "", "fixed8", "e9m9", "x" * 50))
    law = (rng.choice(("nearest", "stochastic", "stochastic", "bogus")), *key_bits(case.key), case.purpose)
    calls: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
        "quantize": ({"x": case.x}, lambda x: ops.quantize(x, format, *law)),
        "corrected": ({"mu": case.x, "variance": torch.rand(case.shape)}, lambda **t: ops.corrected(**t, format=format, **exact)),
        "encode": ({"values": case.x}, lambda values: ops.encode(values, format)),
        "decode": ({"codes": codes, "exponents": exponents}, lambda **t: ops.decode(**t, format=format)),
    }  # fmt: skip
    exact: dict[str, Any] = {"algorithm": "exact", **dict(zip(("seed", "stream", "step"), law[1:4], strict=True))}
    t, call = calls[rng.choice(list(calls))]
    corrupt(t, rng, DENSE)
    if "exponents" in t and rng.random() < 0.1:
        t["exponents"] = None
    fine, result = attempt(lambda: call(**t))
    with native.disabled():
        also, expected = attempt(lambda: call(**t))
    expect(fine == also, f"{list(t)} {format}: one path refuses: {expected if fine else result}")
    if not fine:
        return REFUSED
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (result, expected)), strict=True):
        equal = same(a, b) if a.dtype == torch.float32 else torch.equal(a.nan_to_num(), b.nan_to_num())
        expect(equal, f"{list(t)} of {format}: the paths differ")
    return COMPUTED


# ---- QTensors


def use(q: ql.QTensor, rng: Random) -> Any:
    """Do something with a QTensor; return its numbers, or None after something that has others."""
    target, rows = ql.encode(torch.zeros(q.base_shape), q.format), torch.zeros(2, dtype=torch.int64)
    reads: tuple[Callable[[], Any], ...] = (
        q.decode, lambda: q + 0.0, lambda: decoded(q.clone()), lambda: decoded(q.detach()), lambda: copy.deepcopy(q).decode(),
        lambda: decoded(target.copy_(q)), lambda: save_and_load(q).decode(),
        lambda: QShard.from_tensor(q).decode() if q.dim() else q.decode(),
    )  # fmt: skip
    others: tuple[Callable[[], Any], ...] = (
        lambda: q.copy_(target), lambda: q.add_(1.0), lambda: decoded(q[:1]) if q.dim() else None, lambda: q.to("meta"),
        lambda: step_tensors([TensorStep(q, torch.ones(q.shape), ql.Key(0))], StepSettings(0.1, 1000)),
        lambda: embedding(rows, q) if q.dim() == 2 and len(q) else None,
    )  # fmt: skip
    if rng.random() < 0.6:
        return rng.choice(reads)()
    rng.choice(others)()
    return None


def save_and_load(q: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def qtensor_call(rng: Random) -> str:
    """Make a QTensor of corrupted codes, or corrupt them afterwards, and use it on either path."""
    case = Case.draw(rng)
    codes, exponents = case.coded()
    if wild := rng.random() < 0.2:
        randomize_codes(codes, exponents, rng)
    numbers = decode_plainly(case, codes, exponents).clone()
    t: dict[str, Any] = {"codes": pack_codes(codes, case.format)}
    t["exponents"] = exponents if case.format.has_exponents else None
    loaded, verdict, shape = rng.random() < 0.3, SOUND, case.shape
    if corrupted := rng.random() < 0.5:
        verdict = corrupt(t, rng, ALL)
        shape = rng.choice((shape, shape, shape, torch.Size((-1,)), torch.Size((2**32, 2**32)), torch.Size((3,))))
    about = (t["codes"], t["exponents"], case.format, shape, torch.float32)
    fine, q = attempt(lambda: qtensor._rebuild(*about, None, False, False) if loaded else ql.QTensor(*about))
    if not fine:
        expect(corrupted or (loaded and wild), f"sound codes were refused: {q}")
        return REFUSED
    if q.is_meta:
        return COMPUTED  # it has no numbers, and no memory to misread
    if not corrupted:
        verdict = corrupt_codes(q, rng)
    with native.disabled() if rng.random() < 0.3 else torch.no_grad():
        fine, result = attempt(lambda: use(q, rng))
    if not fine:
        expect(verdict != SOUND or wild or is_odd(q.codes), f"a sound QTensor was refused: {result}")
        return REFUSED
    expect(verdict != UNSOUND or result is None, f"a {case.format} tensor of shape {tuple(case.shape)} was misread")
    if result is not None and not wild:
        expect(same(result.detach() + 0.0, numbers + 0.0), f"{case.format} {tuple(case.shape)} has other numbers")
    return COMPUTED
