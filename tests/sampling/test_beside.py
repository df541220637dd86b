"""Centre, mask, box and preconditioner of a sampler: what they do, what they keep, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.quantization.qtensor import QTensor, decoded

KINDS: list[type[Any]] = [ql.SGLD, ql.SGHMC]
FORMATS = [None, "bfp8", "fixed8.5", "fp8_e4m3", "bf16"]


def weights(shape: tuple[int, ...] = (16, 32), seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def run(sampler: Any, steps: int, seed: int = 7) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in (p for group in sampler.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=draw) + decoded(p.detach())
        sampler.step()


# ---- localization


@pytest.mark.parametrize("kind", KINDS)
def test_localization_is_a_gradient_of_its_own(kind: type[Any]) -> None:
    """γ/N (θ - w0) in the force: a chain with it has the weights of one whose gradients have it, in float64 to the last bits."""
    start = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with_, without = (nn.Parameter(start.clone()) for _ in range(2))
    center = start + 0.3
    a = kind([with_], lr=0.05, num_data=200, localization=20.0, center=[center])
    b = kind([without], lr=0.05, num_data=200)
    for _ in range(10):
        with_.grad = with_.detach().sin()
        without.grad = without.detach().sin() + 20 / 200 * (without.detach() - center)
        a.step()
        b.step()
    assert torch.allclose(with_, without, atol=1e-12)
    assert not torch.allclose(with_, start, atol=1e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_the_initial_weights_are_kept_exactly_in_as_many_bytes_as_they_have(format: str | None) -> None:
    model = nn.Linear(32, 16, bias=False)
    if format:
        ql.pack(model, format)
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=100, localization=1.0)
    [center] = sampler.centers()
    assert torch.equal(decoded(center).float(), decoded(model.weight.detach()))
    assert center.nbytes == model.weight.nbytes
    before = decoded(center).clone()
    run(sampler, 3)
    assert torch.equal(decoded(center), before)


def test_chains_share_a_centre_that_is_given_to_them() -> None:
    first = ql.SGLD([weights()], lr=0.1, num_data=100, weights="bfp8", localization=1.0, center_format="bf16")
    assert first.centers()[0].dtype == torch.bfloat16
    second = ql.SGLD([weights()], lr=0.1, num_data=100, weights="bfp8", localization=2.0, center=first.centers())
    assert second.centers()[0].data_ptr() == first.centers()[0].data_ptr()
    packed = ql.SGLD([weights()], lr=0.1, num_data=100, localization=1.0, center_format="bfp8")
    third = ql.SGLD([weights()], lr=0.1, num_data=100, localization=1.0, center=packed.centers())
    assert isinstance(packed.centers()[0], QTensor)
    assert third.centers()[0] is packed.centers()[0]


def test_groups_have_their_own_localization_centre_and_mask() -> None:
    a, b = weights(seed=1), weights(seed=2)
    mask = torch.zeros(16, 32, dtype=torch.bool)
    groups = [{"params": [a], "localization": 5.0, "center": [torch.zeros(16, 32)]}, {"params": [b], "mask": [mask]}]
    sampler = ql.SGLD(groups, lr=0.1, num_data=100)
    before = b.detach().clone()
    run(sampler, 2)
    assert torch.equal(b, before)
    assert set(sampler.state[a]) & {"center", "mask"} == {"center"}
    assert set(sampler.state[b]) & {"center", "mask"} == {"mask"}
    assert sampler.param_groups[1]["masked"] is True


def test_centres_and_masks_are_given_by_name_or_by_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    mask = torch.zeros(3, 4, dtype=torch.bool)
    by_name = ql.SGLD(model.named_parameters(), lr=0.1, num_data=10, mask={"0.weight": mask})
    by_tensor = ql.SGLD(model.parameters(), lr=0.1, num_data=10, mask={model[0].weight: mask})
    for sampler in (by_name, by_tensor):
        assert [("mask" in sampler.state[p]) for p in model.parameters()] == [True, False, False, False]


# ---- masks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", [None, "bfp8/32", "fixed8.5", "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_masked_weights_do_not_move_and_the_others_do(
    kind: type[Any], format: str | None, accumulator: str | None
) -> None:
    p, mask = weights(), torch.zeros(16, 32, dtype=torch.bool)
    mask[::2] = True
    sampler = kind([p], lr=0.1, num_data=50, weights=format, accumulator=accumulator, mask=[mask])
    before = p.detach().clone()
    run(sampler, 5)
    assert torch.equal(p[~mask], before[~mask])
    assert (p[mask] != before[mask]).float().mean() > 0.5


def test_weights_that_move_draw_the_same_bits_whatever_the_mask() -> None:
    mask = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)) > 0.5
    free, masked = weights(), weights()
    for p, given in ((free, None), (masked, [mask])):
        sampler = ql.SGLD([p], lr=0.1, num_data=50, weights="fixed8.5", mask=given)
        p.grad = torch.ones(16, 32)
        sampler.step()
    assert torch.equal(free[mask], masked[mask])


def test_a_mask_that_cuts_blocks_is_warned_of_once() -> None:
    mask = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)) > 0.5
    with pytest.warns(ql.QLangevinWarning, match="cuts through blocks of bfp8") as found:
        ql.SGLD([weights(), weights()], lr=0.1, num_data=50, weights="bfp8", mask=[mask, mask])
    assert len(found) == 1


# ---- boxes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_no_weight_leaves_its_box(kind: type[Any], format: str | None, accumulator: str | None) -> None:
    p = weights()
    sampler = kind([p], lr=0.5, num_data=2, weights=format, accumulator=accumulator, box=0.25)
    center = p.detach().clone()
    run(sampler, 10)
    gap = 0.0 if format is None else ql.parse(format).gap(p.detach().abs() + 0.25)
    assert ((p - center).abs() <= 0.25 + 1e-6 + 0.5 * gap).all()
    assert ((p - center).abs() > 0.1).float().mean() > 0.5
    assert torch.equal(p, ql.quantize(p.detach(), format, "nearest")) if format else True


# ---- the preconditioner


def test_gains_are_of_earlier_gradients_only() -> None:
    """From the second step on a step does not depend on its own gradient through G: it is linear in it, in float64."""

    def step(scale: float) -> Tensor:
        p = nn.Parameter(torch.ones(8, dtype=torch.float64))
        sampler = ql.SGLD([p], lr=0.1, num_data=1, temperature=0.0, preconditioner=ql.RMS(format="fp32"))
        for gradient in (1.0, scale):
            before = p.detach().clone()
            p.grad = torch.full((8,), gradient, dtype=torch.float64)
            sampler.step()
        return p.detach() - before

    assert torch.allclose(step(6.0), 3 * step(2.0), rtol=1e-6)
    assert torch.allclose(step(2.0), torch.full((8,), -0.2 / 1.001, dtype=torch.float64), rtol=1e-6)


def test_moments_in_a_byte_are_unbiased() -> None:
    """V after 300 gradients in fp8_e5m2: the mean over 4096 weights within 5 standard errors of E g²; 6e-7 false alarms."""
    n, draw = 4096, torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.zeros(n))
    sampler = ql.SGLD([p], lr=0.0, num_data=10, preconditioner=ql.RMS(decay=0.98))
    for _ in range(300):
        p.grad = 3e-5 * torch.randn(n, generator=draw)
        sampler.step()
    state = sampler.state[p]
    found = decoded(state["moments"]).double() / state["moments_scale"] ** 2 / (3e-5) ** 2
    assert state["moments"].nbytes == n
    assert abs(float(found.mean()) - 1) < 5 * float(found.std()) / math.sqrt(n)


def test_frozen_gains_stay_and_moments_that_grow_get_another_scale() -> None:
    p = weights()
    sampler = ql.SGLD([p], lr=1e-3, num_data=10, preconditioner=ql.RMS(freeze_after=3))
    run(sampler, 3)
    kept = sampler.state[p]["moments"].codes.clone()
    run(sampler, 3)
    assert torch.equal(sampler.state[p]["moments"].codes, kept)
    q = weights()
    grows = ql.SGLD([q], lr=0.0, num_data=10, preconditioner=ql.RMS(decay=0.5))
    for i in range(64):
        q.grad = torch.full(q.shape, 1.1**i)
        grows.step()
    state = grows.state[q]
    found = decoded(state["moments"]).sqrt() / state["moments_scale"]
    assert torch.allclose(found, torch.full(q.shape, 1.1**63), rtol=0.25)


# ---- states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [None, "bfp8"])
def test_a_chain_resumes_bit_for_bit(kind: type[Any], packed: str | None, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(32, 16)
        if packed:
            ql.pack(model, packed)
        mask = {model.weight: torch.arange(16)[:, None].expand(16, 32) >= 8}
        settings: dict[str, Any] = {
            "localization": 3.0,
            "box": 0.5,
            "preconditioner": ql.RMS(freeze_after=6),
            "mask": mask,
        }
        if packed is None:
            settings["center_format"] = "fp8_e5m2"
        return model, kind(model.parameters(), lr=0.05, num_data=100, **settings)

    whole, sampler = make()
    run(sampler, 4)
    ql.save_checkpoint(tmp_path / "c.safetensors", whole, sampler)
    run(sampler, 4, seed=8)
    resumed, other = make()
    ql.load_checkpoint(tmp_path / "c.safetensors", resumed, other)
    run(other, 4, seed=8)
    third, again = make()
    run(again, 4)
    plain, last = make()
    last.load_state_dict(again.state_dict())
    plain.load_state_dict(third.state_dict())
    run(last, 4, seed=8)
    for a, b, c in zip(whole.parameters(), resumed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(decoded(a.detach()), decoded(b.detach()))
        assert torch.equal(decoded(a.detach()), decoded(c.detach()))


def test_a_weight_with_its_velocity_takes_two_bytes() -> None:
    model = ql.pack(nn.Linear(256, 64, bias=False), "bfp8")
    sampler = ql.SGHMC(model.parameters(), lr=0.1, num_data=100)
    velocity = sampler.state[model.weight]["velocity"]
    assert model.weight.nbytes + velocity.nbytes <= 2.01 * model.weight.numel()


def test_stepping_in_backward_is_the_same_chain() -> None:
    def chain(early: bool) -> Tensor:
        torch.manual_seed(0)
        model = ql.pack(nn.Linear(32, 1), "bfp8")
        sampler = ql.SGHMC(
            model.parameters(), lr=0.05, num_data=100, localization=1.0, preconditioner="rms", step_in_backward=early
        )
        x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            sampler.zero_grad()
            model(x).square().mean().backward()
            sampler.step()
        return decoded(model.weight.detach())

    assert torch.equal(chain(True), chain(False))


# ---- what is refused


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "localization must be a finite number", {"localization": -1.0}),
    (ValueError, "localization must be", {"localization": math.nan}),
    (ValueError, "box must be", {"box": 0.0}),
    (ValueError, "box must be", {"box": -1.0}),
    (ValueError, "shape, \\(16, 32\\), got \\(32, 16\\)", {"mask": [torch.ones(32, 16, dtype=torch.bool)]}),
    (ValueError, "each of the 1 parameters, got 2", {"mask": [torch.ones(16, 32, dtype=torch.bool)] * 2}),
    (ValueError, "bool, or of zeros and ones", {"mask": [torch.full((16, 32), 0.5)]}),
    (ValueError, "'initial' or|sequence with a tensor", {"localization": 1.0, "center": "middle"}),
    (
        ValueError,
        "do not fit fixed8.6: its range",
        {"localization": 1.0, "center": [torch.full((16, 32), 9.0)], "center_format": "fixed8.6"},
    ),
    (ValueError, "infinity or a NaN", {"localization": 1.0, "center": [torch.full((16, 32), math.nan)]}),
    (TypeError, "floating tensor", {"localization": 1.0, "center": [torch.zeros(16, 32, dtype=torch.int64)]}),
    (ValueError, "preconditioner must be", {"preconditioner": "adam"}),
    (ValueError, "'bfp4' is coarser than weights='bfp8'", {"accumulator": "bfp4", "preconditioner": "rms"}),
    (ValueError, "unknown format 'nothing'", {"center_format": "nothing"}),
    (ValueError, "entry for 'w'", {"mask": {"w": torch.ones(16, 32, dtype=torch.bool)}}),
]


@pytest.mark.parametrize(("error", "message", "settings"), WRONG)
def test_mistakes_raise_and_change_nothing(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    p = weights()
    before, version = p.detach().clone(), p._version
    with pytest.raises((error, TypeError), match=message):
        ql.SGLD([p], lr=0.1, num_data=100, weights="bfp8", **settings)
    assert torch.equal(p, before)
    assert p._version == version


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("decay must be", {"decay": 1.0}),
        ("decay must be", {"decay": -0.1}),
        ("eps must be", {"eps": 0.0}),
        ("floating point", {"format": "bfp8"}),
        ("freeze_after must be", {"freeze_after": 0}),
    ],
)
def test_a_preconditioner_that_makes_no_sense_is_refused(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        ql.RMS(**settings)


@pytest.mark.parametrize("friction", [0.0, -0.1, math.inf, math.nan, True, "much", None])
def test_a_friction_that_makes_no_sense_is_refused(friction: Any) -> None:
    with pytest.raises(ValueError, match="friction must be"):
        ql.SGHMC([weights()], lr=0.1, num_data=100, friction=friction)


@pytest.mark.parametrize(
    ("weights_", "accumulator"), [("fixed8.6", "fixed8.3"), ("bf16", "fp8_e5m2"), ("fp16", "bf16"), ("bfp8/16", "bfp6")]
)
def test_an_accumulator_that_is_coarser_than_its_weights_is_refused(weights_: str, accumulator: str) -> None:
    with pytest.raises(ValueError, match="is coarser than weights"):
        ql.SGLD([weights()], lr=0.1, num_data=100, weights=weights_, accumulator=accumulator)
    packed = ql.pack(nn.Linear(4, 4), weights_)
    with pytest.raises(ValueError, match="is coarser than weights"):
        ql.SGHMC(packed.parameters(), lr=0.1, num_data=100, accumulator=accumulator)


@pytest.mark.parametrize("unused", [{"center": [torch.zeros(16, 32)]}, {"center_format": "bf16"}])
def test_a_centre_that_nothing_uses_is_warned_of(unused: dict[str, Any]) -> None:
    with pytest.warns(ql.QLangevinWarning, match="a centre is given, but nothing uses it") as found:
        ql.SGLD([weights()], lr=0.1, num_data=100, **unused)
    assert len(found) == 1
    assert found[0].filename == __file__
    ql.SGLD([weights()], lr=0.1, num_data=100, localization=1.0, **unused)
    ql.SGLD([weights()], lr=0.1, num_data=100, box=1.0, **unused)


def test_saved_states_that_do_not_fit_are_refused() -> None:
    sampler = ql.SGHMC([weights()], lr=0.1, num_data=100, weights="bfp8", localization=1.0, mask=[torch.ones(16, 32)])
    run(sampler, 1)
    for name, wrong in (
        ("velocity.codes", torch.zeros(3, dtype=torch.int8)),
        ("mask", torch.zeros(3, dtype=torch.uint8)),
    ):
        state = sampler.state_dict()
        state["state"] = {0: {**state["state"][0], name: wrong}}
        with pytest.raises(ValueError, match=f"saved {name.partition('.')[0]}"):
            sampler.load_state_dict(state)
