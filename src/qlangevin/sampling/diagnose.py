"""Diagnose a chain: does the grid carry the noise that Langevin dynamics asks for, and if not, what would repair it?

One step's gradients are enough. `step_variance` has the estimate for each weight, `diagnosis` what is reported, `remedies` the
search for better settings. Of large parameters evenly spaced rows are measured.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._dtensor import local
from .._validate import check_number
from ..quantization import operators, random
from ..quantization.qtensor import decoded_as
from ..quantization.random import Key
from .diagnosis import TOLERANCE, Diagnosis, ParameterDiagnosis, total_share
from .gradient_rows import MEASURED, RowSample, as_rows, some_rows
from .host_copy import has_no_numbers
from .in_backward import total_gradient
from .keeping import Keeper
from .masks import unpack_mask
from .preconditioner import gain
from .remedies import Case, find_remedies, least_format, total_sums
from .settings import StepSettings
from .step_variance import Proposal, join, measure_step
from .update import Beside, force, quantize_for
from .watch import count_saturated

__all__ = ["Measured", "diagnose_parameters", "diagnose_sampler", "join_batches", "measure_sampler", "propose_step"]


class Measured(NamedTuple):
    """A parameter as it was measured, and what only its gradient or its samples tell."""

    case: Case
    zero_gradients: float | None
    width: float | None  # of the posterior, root mean square


def propose_step(theta: Tensor, gradient: Tensor, settings: StepSettings, beside: Rows | None = None) -> Proposal:
    """Return drift and variance of a step before any grid, as `update` has them; ``gradient`` has passed Q_G.

    Weights that do not move have no drift, and nothing that a grid could add to.
    """
    rows = beside or Rows(Beside())
    f = force(theta, -gradient if settings.maximize else gradient, settings, rows.beside)
    gains, v = rows.beside.gain, torch.full((), settings.variance, dtype=theta.dtype, device=theta.device)
    moving, slope = rows.beside.moving, -settings.lr * (f if gains is None else f * gains)
    v = v if gains is None else v * gains
    if moving is not None:
        slope = torch.where(moving, slope, 0)
    return (
        Proposal(theta, slope, v) if rows.velocity is None else _propose_underdamped(theta, f, slope, v, settings, rows)
    )


def _propose_underdamped(
    theta: Tensor, f: Tensor, slope: Tensor, noise: Tensor, settings: StepSettings, rows: Rows
) -> Proposal:
    """Return the step of the weights given a velocity that is drawn here, and what rounding the velocities adds to its heat.

    Noise of variance ρ that only the weights get raises their variance σ² by the factor 1 + ρ/(2 lr T/N) + ρ/(2 c σ²): the second
    part is energy that friction c has to take out again. Without a width σ only the first is known.
    """
    u, gains, moving = rows.velocity, rows.beside.gain, rows.beside.moving
    assert u is not None
    c, scale = settings.underdamped(rows.unit), None if gains is None else gains.sqrt()
    kick = c.fade * u + c.kick * (f if scale is None else f * scale)
    xi = c.velocity_variance**0.5 * random.normal(Key(0), theta.numel(), device=theta.device).view(theta.shape)
    drift = c.carry * u + c.follow * xi.to(theta.dtype)
    drift = (drift if scale is None else drift * scale) + c.push * (f if gains is None else f * gains)
    v = noise * (c.variance / settings.variance) if settings.variance > 0 else noise
    heat = noise if not rows.width else noise / (1 + noise / (2 * (settings.friction or 0.0) * rows.width**2))
    warmer = torch.zeros_like(theta)
    if c.velocity_variance > 0:
        proposal = Proposal(u, kick, torch.full_like(noise, c.velocity_variance))
        warmer = (measure_step(proposal, rows.format, settings.rounding).inflation - 1).to(theta.dtype)
    if moving is not None:
        drift, warmer = torch.where(moving, drift, 0), torch.where(moving, warmer, 0)
    return Proposal(theta, drift, v, noise, slope, heat, warmer)


class Rows(NamedTuple):
    """Settings and velocities of some rows of a parameter, beside their weights and gradient."""

    beside: Beside
    velocity: Tensor | None = None
    unit: float = 1.0
    format: str | None = None  # of the velocity
    width: float | None = None  # of the posterior

    def kinetic(self, settings: StepSettings) -> float | None:
        """Return the temperature of the velocities over that asked for; None without either."""
        moving, heat = self.beside.moving, settings.temperature / settings.num_data
        if self.velocity is None or not heat or (moving is not None and not bool(moving.any())):
            return None
        u = (self.velocity if moving is None else self.velocity[moving]).double()
        return float(u.square().mean()) * self.unit**2 / heat


def read_rows(
    theta: Tensor, state: Mapping[str, Any], settings: StepSettings, rows: slice, width: float | None = None
) -> Rows:
    """Return what a sampler keeps for some rows of a parameter; gains only once there are moments."""
    dtype, rms = operators.working_dtype(theta.dtype), settings.rms

    def take(t: Tensor) -> Tensor:
        return as_rows(decoded_as(t, dtype))[rows]

    gains = None if rms is None or "moments" not in state else gain(take(state["moments"]), state["moments_scale"], rms)
    moving = as_rows(unpack_mask(state["mask"], theta.shape))[rows] if "mask" in state else None
    center = take(state["center"]) if settings.localization and "center" in state else None
    beside = Beside(center, gains, moving)
    if settings.friction is None or "velocity" not in state:
        return Rows(beside)
    return Rows(beside, take(state["velocity"]), state["velocity_unit"], settings.velocity_format(theta), width)


def take_rows(gradient: Tensor, settings: StepSettings, key: Key) -> tuple[RowSample, float | None]:
    """Return Q_G of some rows of a gradient, and the share of its numbers that Q_G rounds to zero."""
    values = as_rows(gradient.detach().to(operators.working_dtype(gradient.dtype)))
    rounded = quantize_for(random.GRADIENT, values, settings.gradients, "stochastic", key)
    zeros = None
    if settings.gradients is not None and values.numel():
        zeros = float(((rounded == 0) & (values != 0)).double().mean())
    rows = some_rows(values.shape, MEASURED)
    return RowSample(rows, rounded[rows]), zeros


def measure_parameter(
    name: str, theta: Tensor, state: Mapping[str, Any], sample: RowSample, settings: StepSettings,
    width: float | None = None,
) -> Case:  # fmt: skip
    """Return one parameter, ready to be diagnosed; ``sample`` has the gradient of some rows, after Q_G."""
    weights = decoded_as(theta.detach(), operators.working_dtype(theta.dtype))
    base = as_rows(state["accumulator"] if settings.accumulator and "accumulator" in state else weights)
    some = base[sample.rows]
    beside = read_rows(theta, state, settings, sample.rows, width)
    proposal = propose_step(some, sample.gradient.to(some.dtype).reshape(some.shape), settings, beside)
    if len(some) < len(base):  # blocks of whole tensors take their gap from the largest weight
        largest = int(base.flatten(1).abs().amax(1).argmax()) if base.dim() > 1 else int(base.abs().argmax())
        proposal = proposal.with_row(base[largest : largest + 1])
    format = settings.weights_format(theta)
    return Case(
        name, theta.numel(), theta.shape, theta.dtype, proposal, len(some), format,
        settings.accumulator, settings.rounding, settings.lr, count_saturated(weights, format) / max(1, theta.numel()),
        beside.kinetic(settings),
    )  # fmt: skip


def diagnose_parameters(measured: Sequence[Measured], tolerance: float = TOLERANCE) -> Diagnosis:
    """Return the diagnosis of parameters that were measured."""
    if not tolerance > 1:
        raise ValueError(f"tolerance must be above 1, such as {TOLERANCE}, got {tolerance!r}")
    cases = [each.case for each in measured]
    noisy = [case for case in cases if case.proposal.noisy]
    parts = []
    for case, zeros, width in measured:
        found = ParameterDiagnosis.of(
            case.name, str(case.grid), case.sums, has_shares=not case.proposal.noisy_by_velocity_alone,
            gap_over_width=None, saturated=case.saturated, zero_gradients=zeros,
            suffices=least_format(case, tolerance) if case.proposal.noisy else None, kinetic=case.kinetic,
        )  # fmt: skip
        parts.append(_with_width(found, width))
    width = _root_mean_square([(part.size, m.width) for part, m in zip(parts, measured, strict=True)])
    total = _with_width(_total(parts, noisy or cases), width)
    nbytes = sum(case.nbytes for case in cases) / sum(case.size for case in cases)
    return Diagnosis(tuple(parts), total, tuple(find_remedies(noisy, tolerance)) if noisy else (), nbytes, tolerance)


def _total(parts: Sequence[ParameterDiagnosis], noisy: Sequence[Case]) -> ParameterDiagnosis:
    """Return the figures over all weights; what concerns noise, over those that have noise."""
    formats = dict.fromkeys(part.format for part in parts)
    shares: dict[str, Any] = {name: total_share(parts, name) for name in ("saturated", "zero_gradients", "kinetic")}
    name = next(iter(formats)) if len(formats) == 1 else "several"
    has_shares = not any(case.proposal.noisy_by_velocity_alone for case in noisy)
    found = ParameterDiagnosis.of("all", name, total_sums(noisy), has_shares=has_shares, gap_over_width=None, **shares)
    return replace(found, size=sum(part.size for part in parts))


def join_batches(batches: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Return the parameters as if the gradients of several batches were those of further rows; weights must not have moved."""
    joined = []
    for same in zip(*batches, strict=True):
        proposals, count = [m.case.proposal for m in same], same[0].case.measured
        case = replace(same[0].case, proposal=join(proposals, count), measured=count * len(same))
        zeros = [m.zero_gradients for m in same if m.zero_gradients is not None]
        joined.append(same[0]._replace(case=case, zero_gradients=sum(zeros) / len(zeros) if zeros else None))
    return joined


def _with_width(found: ParameterDiagnosis, width: float | None) -> ParameterDiagnosis:
    """Add the gap over the posterior's width, if that is known and not zero."""
    return replace(found, gap_over_width=found.gap / width) if width else found


def _root_mean_square(parts: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the root mean square over parameters of these sizes; None if one is not known."""
    if any(width is None for _, width in parts):
        return None
    return float((sum(n * (w or 0.0) ** 2 for n, w in parts) / sum(n for n, _ in parts)) ** 0.5)


def read_widths(
    params: Sequence[tuple[str, Tensor]], widths: Mapping[str, Tensor | float] | None
) -> list[float | None]:
    """Return the root mean square of each parameter's posterior width; raise unless what was given are widths of parameters."""
    if widths is None:
        return [None] * len(params)
    if not isinstance(widths, Mapping):
        example = f"{{{params[0][0]!r}: 0.1}}"
        raise TypeError(
            f"widths must be a mapping from the names of parameters, such as {example}, got {widths!r:.100}"
        )
    if unknown := [*widths.keys() - {name for name, _ in params}]:
        raise ValueError(f"widths has no parameter for {unknown[0]!r}; names are such as {params[0][0]!r}")
    return [_read_width(name, p, widths[name]) if name in widths else None for name, p in params]


def _read_width(name: str, p: Tensor, width: Tensor | float) -> float:
    """Return the root mean square of the width of one parameter's weights."""
    if isinstance(width, numbers.Real):
        return check_number(f"the width of {name}", width)
    wanted = f"the width of {name} must be a tensor of its shape {tuple(p.shape)}, or a number for all of its weights"
    if not isinstance(width, Tensor):
        raise TypeError(f"{wanted}, got a {type(width).__name__}")
    if width.dim() and width.shape not in (p.shape, local(p).shape):
        raise ValueError(f"{wanted}, got shape {tuple(width.shape)}")
    return float(width.double().square().mean().sqrt())


# ---- what it needs of a sampler


def diagnose_sampler(
    sampler: Keeper, model: nn.Module | None, widths: Mapping[str, Tensor | float] | None, tolerance: float
) -> Diagnosis:
    """Return the diagnosis of a sampler's chain, of the shards that this process holds."""
    measured = [*measure_sampler(sampler, model, widths)]
    if not measured:
        raise RuntimeError(
            "there are no gradients to diagnose: call diagnose() after backward() and before zero_grad(), or after a step. A "
            "checkpoint holds no gradients: after loading one, run one more forward and backward pass, then call diagnose()"
        )
    return diagnose_parameters(measured, tolerance)


@torch.no_grad()
def measure_sampler(
    sampler: Keeper, model: nn.Module | None = None, widths: Mapping[str, Tensor | float] | None = None
) -> Iterator[Measured]:
    """Yield the parameters that have a gradient, or of which rows of one were kept."""
    sampler.check()
    called = {} if model is None else {p: name for name, p in model.named_parameters()}
    everyone = [(p, group) for group in sampler.param_groups for p in group["params"]]
    own = [name for group in sampler.param_groups for name in group.get("param_names", [None] * len(group["params"]))]
    names = [called.get(p) or own[i] or f"parameter {i}" for i, (p, _) in enumerate(everyone)]
    found_widths = read_widths([(name, p) for name, (p, _) in zip(names, everyone, strict=True)], widths)
    for (p, group), name, width in zip(everyone, names, found_widths, strict=True):
        theta, state, settings = local(p), sampler.state[p], StepSettings.from_group(group)
        found = None if has_no_numbers(p) or not theta.numel() else _gradient(sampler, p, state, settings)
        if found is not None:
            yield Measured(measure_parameter(name, theta, state, found[0], settings, width), found[1], width)


def _gradient(
    sampler: Keeper, p: Tensor, state: dict[str, Any], settings: StepSettings
) -> tuple[RowSample, float | None] | None:
    """Return rows of a parameter's gradient after Q_G, with the random bits of the next step, and the share that vanishes."""
    key = settings.key_of(p, state["index"], state["step"] + 1)
    if (gradient := total_gradient(p, state)) is not None:
        return take_rows(gradient, settings, key)
    if (kept := sampler._kept.get(p)) is None:
        return None
    rounded, zeros = take_rows(kept.gradient, settings, key)  # all of them: fewer were kept than are measured
    return RowSample(kept.rows, rounded.gradient), zeros
