"""What of a model goes into a sample, and how it gets out again.

A parameter that is on a grid goes in as codes, without loss, whether it is packed or a float tensor whose sampler keeps it on
that grid; everything else goes in as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..quantization.formats import Format, parse
from ..quantization.qtensor import QTensor, decoded, encode_on_grid
from .files import DTYPES, DamagedError
from .manifest import NAMES, Kind, TensorInfo

__all__ = [
    "assemble",
    "check_fits",
    "describe",
    "gather",
    "load_into",
    "moved",
    "named_tensors",
    "plain",
    "ranks_of",
    "unwrapped",
]

RANKS = "_qlangevin_ranks"  # what `replicate` leaves on a model
_DTYPE_NAMES = {dtype: name for name, dtype in NAMES.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, without what `torch.compile` or data parallelism put around it: its names are those that count."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def ranks_of(model: nn.Module) -> int:
    """How many processes step the model together."""
    return int(getattr(unwrapped(model), RANKS, 1))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; what is shared stands there once, under its first name."""
    parameters, buffers = dict[int, tuple[str, Tensor]](), dict[int, tuple[str, Tensor]]()
    for where, module in unwrapped(model).named_modules():
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
    """What the `named_tensors` of a model are; a sampler knows the formats of parameters that are not packed."""
    groups = sampler.param_groups if sampler is not None else []
    known = {id(p): group.get("weights") for group in groups for p in group["params"]}
    return {name: _info(name, t, known.get(id(t))) for name, t in tensors.items()}


def _info(name: str, t: Tensor, weights: str | Format | None) -> TensorInfo:
    if t.dtype not in DTYPES or t.layout != torch.strided:
        raise TypeError(f"{name!r} is a {t.layout} tensor of {t.dtype}, which cannot be stored")
    if hasattr(t, "_local_tensor"):
        raise TypeError(
            f"{name!r} is in shards, one on each rank; store what distributed.gathered(model, sampler) gives"
        )
    if name == "__metadata__" or name != name.encode(errors="ignore").decode():
        raise ValueError(f"{name!r} cannot be the name of a tensor in a file; rename it")
    if not isinstance(t, nn.Parameter):
        return _made("buffer", tuple(t.shape), t.dtype, None)
    format = t.format if isinstance(t, QTensor) else parse(weights) if weights is not None and t.requires_grad else None
    return _made("parameter" if t.requires_grad else "frozen", tuple(t.shape), t.dtype, format)


@lru_cache(maxsize=4096)  # every append asks for those of all tensors
def _made(kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, format: Format | None) -> TensorInfo:
    coded = str(format) if format is not None and format.storage_bits < 32 else None
    return TensorInfo(kind, shape, _DTYPE_NAMES[dtype], coded)


def check_fits(
    found: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo], what: str, formats: bool = False
) -> None:
    """Refuse a model that has other tensors: which ones, and how they differ.

    How a parameter is kept, as codes or floats, frozen or not, makes no difference unless ``formats`` are asked for.
    """
    odd = [f"{name!r} is missing in the model" for name in tensors if name not in found]
    odd += [f"{name!r} is in the model only" for name in found if name not in tensors]
    for name in (name for name in tensors if name in found):
        there, here = tensors[name], found[name]
        same = there.shape == here.shape and there.dtype == here.dtype
        if formats and here.format is not None:
            same &= there.format == here.format
        if formats or "buffer" in (there.kind, here.kind):
            same &= there.kind == here.kind
        if not same:
            odd.append(f"{name!r} is {there} there and {here} in the model")
    if odd:
        more = f"; and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise ValueError(f"{what} is of another model: {'; '.join(odd[:5])}{more}")


def gather(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """What files hold of the tensors that are described: contiguous, on the CPU."""
    parts = [_parts(name, tensors[name], info) for name, info in infos.items()]
    return {part: _resolved(t.cpu().contiguous()) for found in parts for part, t in found.items()}


def _resolved(t: Tensor) -> Tensor:
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def _parts(name: str, t: Tensor, info: TensorInfo) -> dict[str, Tensor]:
    if info.format is None:
        values = plain(t)
        if info.kind != "buffer" and not _finite(values):
            raise ValueError(f"{name!r} holds an infinity or a NaN: the chain has diverged, and nothing was stored")
        return {name: values}
    format = parse(info.format)
    q = t if isinstance(t, QTensor) and not t.is_view else encode_on_grid(plain(t), format)
    if q is None:
        values = plain(t)
        away = f" ({int((~format.is_representable(values)).sum())} of {t.numel()})" if _finite(values) else ""
        raise ValueError(
            f"{name!r} holds numbers that are not on the grid of {format}{away}: something other than the sampler wrote them"
        )
    return {f"{name}.codes": q.codes} | ({} if q.exponents is None else {f"{name}.exponents": q.exponents})


def plain(t: Tensor) -> Tensor:
    """The numbers of a tensor, packed or not, without a way back for autograd."""
    with torch.no_grad():  # detaching a QTensor for the first time imports the compiler, which takes seconds
        return decoded(t).detach()


def moved(t: Tensor, device: torch.device | str | None) -> Tensor:
    """A tensor on a device, codes as codes."""
    if not isinstance(t, QTensor):
        return t.to(device)
    exponents = None if t.exponents is None else t.exponents.to(device)
    return QTensor(t.codes.to(device), exponents, t.format, t.base_shape, t.dtype)


def assemble(parts: Mapping[str, Tensor], tensors: Mapping[str, TensorInfo], what: str) -> dict[str, Tensor]:
    """The inverse of `gather`; packed parameters come back as QTensors. Codes that stand for no number are refused."""
    found: dict[str, Tensor] = {}
    for name, info in tensors.items():
        if info.format is None:
            t = parts[name]
            good = info.kind == "buffer" or _finite(t)
        else:
            format, codes, exponents = parse(info.format), parts[f"{name}.codes"], parts.get(f"{name}.exponents")
            t = QTensor(codes, exponents, format, torch.Size(info.shape), NAMES[info.dtype])
            good = _are_codes(t)
        if not good:
            raise DamagedError(f"{what} is damaged: {name!r} holds what is no number of {info.format or info.dtype}")
        found[name] = t
    return found


def _are_codes(q: QTensor) -> bool:
    """Whether all codes are of the kind that `encode` makes."""
    return q.format.are_codes(q.unpacked(), q.exponents)


def _finite(t: Tensor) -> bool:
    # Torch does not know of all 8-bit floats whether they are finite.
    return bool((t.float() if t.dtype.is_floating_point and t.itemsize == 1 else t).isfinite().all())


def load_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put values in the place of a model's: codes into codes where the format is the same."""
    with torch.no_grad():
        for name, t in tensors.items():
            t.copy_(values[name])
