"""The tensors of a model and what a file stores of them.

A parameter on a grid is stored as codes, without loss, whether it is packed or a float tensor whose sampler keeps it on that
grid; every other parameter and buffer is stored as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..quantization.formats import Format, fit_dtype, parse
from ..quantization.operators import working_dtype
from ..quantization.qtensor import QTensor, decoded, encode_on_grid
from .files import DamagedError
from .manifest import NAMES, Kind, TensorInfo
from .tensor_file import DTYPES

__all__ = [
    "check_fits",
    "count_ranks",
    "describe",
    "encode_tensors",
    "load_into",
    "move_to",
    "named_tensors",
    "restore_tensors",
    "to_plain",
    "unwrap",
]

RANKS = "_qlangevin_ranks"  # attribute of a model, set by `distributed.replicate`
_DTYPE_NAMES = {dtype: name for name, dtype in NAMES.items()}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `torch.compile` and data parallelism: tensors are stored under its names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def count_ranks(model: nn.Module) -> int:
    """Return the number of processes that step the model together."""
    return int(getattr(unwrap(model), RANKS, 1))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; shared tensors once, under their first name."""
    parameters, buffers = dict[int, tuple[str, Tensor]](), dict[int, tuple[str, Tensor]]()
    for where, module in unwrap(model).named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise TypeError(
                f"{where or 'the model'!r} ({type(module).__name__}) has extra state, which could hold anything; "
                "only parameters and buffers can be stored"
            )
        prefix = where + "." if where else ""
        for name, p in module._parameters.items():
            if p is not None:
                parameters.setdefault(id(p), (prefix + name, p))
        for name, b in module._buffers.items():
            if b is not None and name not in module._non_persistent_buffers_set:
                buffers.setdefault(id(b), (prefix + name, b))
    return dict((parameters | {key: found for key, found in buffers.items() if key not in parameters}).values())


def describe(tensors: Mapping[str, Tensor], sampler: Optimizer | None = None) -> dict[str, TensorInfo]:
    """Describe the `named_tensors` of a model; a sampler knows the formats of parameters that are not packed."""
    groups = sampler.param_groups if sampler is not None else []
    known = {id(p): group.get("weights") for group in groups for p in group["params"]}
    return {name: _describe_one(name, t, known.get(id(t))) for name, t in tensors.items()}


def _describe_one(name: str, t: Tensor, weights: str | Format | None) -> TensorInfo:
    if t.dtype not in DTYPES or t.layout != torch.strided:
        raise TypeError(f"{name!r} is a {t.layout} tensor of {t.dtype}, which cannot be stored")
    if hasattr(t, "_local_tensor"):
        raise TypeError(
            f"{name!r} is in shards, one on each rank; store what distributed.gathered(model, sampler) gives"
        )
    if name == "__metadata__" or name != name.encode(errors="ignore").decode():
        raise ValueError(f"{name!r} cannot be the name of a tensor in a file; rename it")
    if not isinstance(t, nn.Parameter):
        return _make_info("buffer", tuple(t.shape), t.dtype, None)
    format = t.format if isinstance(t, QTensor) else parse(weights) if weights is not None and t.requires_grad else None
    return _make_info("parameter" if t.requires_grad else "frozen", tuple(t.shape), t.dtype, format)


@lru_cache(maxsize=4096)  # every append describes all tensors again
def _make_info(kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, format: Format | None) -> TensorInfo:
    coded = str(format) if format is not None and format.storage_bits < 32 else None
    return TensorInfo(kind, shape, _DTYPE_NAMES[dtype], coded)


def check_fits(
    found: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo], what: str, formats: bool = False
) -> None:
    """Raise ValueError if a model has other tensors than those stored, naming them.

    With ``formats``, parameters must also be packed alike and frozen alike.
    """
    odd = [f"{name!r} is missing in the model" for name in tensors if name not in found]
    odd += [f"{name!r} is in the model only" for name in found if name not in tensors]
    for name in (name for name in tensors if name in found):
        there, here = tensors[name], found[name]
        same = there.shape == here.shape and there.dtype == here.dtype
        if formats and here.format is not None:
            same &= there.format == here.format
        if formats or "buffer" in (there.kind, here.kind):
            same &= _is_frozen(there) == _is_frozen(here) and (there.kind == "buffer") == (here.kind == "buffer")
        if there.shape == here.shape and there.dtype != here.dtype:
            remedy = f"model.to(torch.{there.dtype})"
            odd.append(f"{name!r} is of {there.dtype} there and of {here.dtype} in the model ({remedy} would fit)")
        elif not same:
            odd.append(f"{name!r} is {there} there and {here} in the model")
    if odd:
        more = f"; and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise ValueError(f"{what} is of another model: {'; '.join(odd[:5])}{more}{_explain_adapters(found, tensors)}")


def _explain_adapters(found: Iterable[str], stored: Iterable[str]) -> str:
    """Return a sentence on adapters that only one of the two has; peft names what they are on ``base_layer``."""
    here, there = (any(".base_layer." in name for name in names) for names in (found, stored))
    if there and not here:
        return ". It was sampled with an adapter: give it the model that get_peft_model makes, with the same config"
    if here and not there:
        return ". It was sampled without an adapter: give it the model as it is before get_peft_model"
    return ""


def _is_frozen(info: TensorInfo) -> bool:
    return info.kind in ("frozen", "reference")


def encode_tensors(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return what a file stores of the tensors described, contiguous and on the CPU: codes, exponents, plain tensors."""
    stored: dict[str, Tensor] = {}
    for name, info in infos.items():
        for stored_name, t in _encode_one(name, tensors[name], info).items():
            stored[stored_name] = _resolve(t.cpu().contiguous())
    return stored


def _resolve(t: Tensor) -> Tensor:
    """Apply a conjugation or negation that PyTorch has put off."""
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def _encode_one(name: str, t: Tensor, info: TensorInfo) -> dict[str, Tensor]:
    if info.format is None:
        values = to_plain(t)
        if info.kind != "buffer" and not _finite(values):
            raise ValueError(f"{name!r} holds an infinity or a NaN: the chain has diverged, and nothing was stored")
        return {name: values}
    format = parse(info.format)
    q = t if isinstance(t, QTensor) and not t.is_view else encode_on_grid(to_plain(t), format)
    if q is None:
        values = to_plain(t)
        working = working_dtype(values.dtype)
        on_grid = fit_dtype(format, values.dtype).is_representable(values.to(working)) if _finite(values) else None
        away = "" if on_grid is None else f" ({int((~on_grid).sum())} of {t.numel()})"
        raise ValueError(
            f"{name!r} holds numbers that are not on the grid of {format}{away}: something other than the sampler wrote them"
        )
    return {f"{name}.codes": q.codes} | ({} if q.exponents is None else {f"{name}.exponents": q.exponents})


def to_plain(t: Tensor) -> Tensor:
    """Return the numbers of a tensor, packed or not, detached from autograd."""
    with torch.no_grad():  # the first detach of a QTensor imports PyTorch's compiler, which takes seconds
        return decoded(t).detach()


def move_to(t: Tensor, device: torch.device | str | None) -> Tensor:
    """Move a tensor to a device, packed ones as codes."""
    if not isinstance(t, QTensor):
        return t.to(device)
    exponents = None if t.exponents is None else t.exponents.to(device)
    return QTensor(t.codes.to(device), exponents, t.format, t.base_shape, t.dtype)


def restore_tensors(stored: Mapping[str, Tensor], infos: Mapping[str, TensorInfo], what: str) -> dict[str, Tensor]:
    """Invert `encode_tensors`; codes become QTensors. Raise DamagedError for codes that stand for no number."""
    found: dict[str, Tensor] = {}
    for name, info in infos.items():
        if info.format is None:
            t = stored[name]
            good = info.kind == "buffer" or _finite(t)
        else:
            format, codes, exponents = parse(info.format), stored[f"{name}.codes"], stored.get(f"{name}.exponents")
            t = QTensor(codes, exponents, format, torch.Size(info.shape), NAMES[info.dtype])
            good = _are_codes(t)
        if not good:
            raise DamagedError(f"{what} is damaged: {name!r} holds what is no number of {info.format or info.dtype}")
        found[name] = t
    return found


def _are_codes(q: QTensor) -> bool:
    """Return True if `encode` could have made all of these codes."""
    return q.format.are_codes(q.unpacked(), q.exponents)


def _finite(t: Tensor) -> bool:
    # PyTorch has no isfinite for some 8-bit floats.
    return bool((t.float() if t.dtype.is_floating_point and t.itemsize == 1 else t).isfinite().all())


def load_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of a model: codes into codes where the format is the same."""
    with torch.no_grad():
        for name, t in tensors.items():
            t.copy_(values[name])
