"""Activation checkpointing of lowered models: gradients, and the bits of later runs, are those without it."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _composable as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.checkpointed import (
    MODES,
    Block,
    Blocks,
    Mode,
    batches,
    build_blocks,
    gradients_of,
    run_region,
    same,
    step_results,
)
from tests.helpers.networks import CASES, build, two_linear

# PyTorch's own, where a region runs without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return step_results(build_blocks(), batches(3))


@pytest.mark.parametrize("mode", MODES)
def test_regions_draw_the_bits_of_the_forward(mode: Mode, expected: list[Tensor]) -> None:
    assert same(step_results(build_blocks(mode), batches(3)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_without_replay_they_would_not(mode: Mode, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlangevin.lowering.handler.replay.enclosing_regions", tuple)
    assert not same(step_results(build_blocks(mode), batches(3)), expected)


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", [None, *MODES])
def test_the_lowered_model_may_be_the_region(inner: Mode, outer: Mode, expected: list[Tensor]) -> None:
    model = build_blocks(inner)
    assert same(step_results(model, batches(3), lambda x: run_region(outer, model, x)), expected)


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_nested_regions(outer: Mode, inner: Mode, expected: list[Tensor]) -> None:
    assert same(step_results(build_blocks(outer, inner), batches(3)), expected)
    model = build_blocks(outer, inner)
    assert same(step_results(model, batches(3), lambda x: run_region(inner, model, x)), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*CASES, "resnet channels-last"])
def test_all_kinds_of_networks(name: str, mode: Mode) -> None:
    model, x, labels = build(name.split()[0])
    if "channels-last" in name:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False  # a recomputation updates them once more, lowered or not
    ql.lower(model, "bfp8", "bfp8")
    other, anything = copy.deepcopy(model), torch.zeros(1, requires_grad=True)

    def in_region(_: Tensor) -> Tensor:
        y: Tensor = run_region(mode, lambda x, _: other(x), x, anything)
        return nn.functional.cross_entropy(y, labels)

    for _ in range(2):
        nn.functional.cross_entropy(model(x), labels).backward()
        in_region(x).backward()
        assert all(
            torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
            for p, q in zip(model.parameters(), other.parameters(), strict=True)
        )
    assert lowering.state_dict(model) == lowering.state_dict(other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_without_kernels(mode: Mode, dtype: torch.dtype) -> None:
    found = []
    for m in (None, mode):
        model = ql.lower(two_linear().to(dtype), "bfp8e6", "bfp8e6")
        nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
        nn.init.eye_(model[2].weight)  # type: ignore[arg-type]
        torch.manual_seed(0)
        inputs = [torch.randn(32, 64, dtype=dtype).requires_grad_() for _ in range(2)]
        for i in (0, 2):
            nn.init.zeros_(model[i].bias)  # type: ignore[arg-type]
        found.append(step_results(model, inputs, lambda x, m=m, model=model: run_region(m, model, x)))  # type: ignore[misc]
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_sequential(mode: Mode) -> None:
    model = ql.lower(nn.Sequential(*(two_linear() for _ in range(4))), "bfp8", "bfp8")
    other = copy.deepcopy(model)
    expected = step_results(model, batches(2, 64))
    found = step_results(
        other, batches(2, 64), lambda x: checkpoint_sequential(other, 2, x, use_reentrant=mode == "reentrant")
    )
    assert same(found, expected)


@pytest.mark.parametrize("early", [True, False])
def test_early_stop(early: bool, expected: list[Tensor]) -> None:
    with set_checkpoint_early_stop(early):
        assert same(step_results(build_blocks("hooks", "hooks"), batches(3)), expected)


def test_options_of_checkpoint(expected: list[Tensor]) -> None:
    model = build_blocks("hooks")
    model.options = {"determinism_check": "none", "debug": False, "early_stop": False}
    assert same(step_results(model, batches(3)), expected)


def test_selective_checkpointing(expected: list[Tensor]) -> None:
    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = build_blocks("hooks")
    model.options = {"context_fn": lambda: create_selective_checkpoint_contexts(choose)}
    assert same(step_results(model, batches(3)), expected)


@pytest.mark.parametrize("mode", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT, None])
def test_wrappers_of_torch_distributed(mode: CheckpointImpl | None, expected: list[Tensor]) -> None:
    model = build_blocks()
    if mode is None:
        for block in model.blocks:
            composable.checkpoint(block)  # type: ignore[attr-defined]
    else:
        wrap = partial(checkpoint_wrapper, checkpoint_impl=mode)
        apply_activation_checkpointing(model, wrap, lambda m: isinstance(m, Block))
    assert same(step_results(model, batches(3)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_other_runs_before_backward_count_on(mode: Mode) -> None:
    found = list[list[Tensor]]()
    for m in (None, mode):
        model, (x, other) = build_blocks(m), batches(2)
        torch.manual_seed(2)
        y = model(x)
        with torch.no_grad():
            between = model(other)
        later = model(other)
        torch.manual_seed(3)
        model.eval()
        evaluated = model(other)
        model.train()
        y.square().sum().backward()
        later.sum().backward()
        found.append([y, between, later, evaluated, *gradients_of(model, x, other)])
        found[-1].append(torch.tensor(list(lowering.state_dict(model).values())))
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_two_backwards_through_one_forward(mode: Mode) -> None:
    found = list[list[Tensor]]()
    for m in (None, mode):
        model, (x,) = build_blocks(m), batches(1)
        y = model(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        found.append(gradients_of(model, x))
        model.zero_grad()
        found[-1] += step_results(model, batches(1))
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_with_gradients(mode: Mode) -> None:
    models = [build_blocks(m).eval() for m in (None, mode)]
    assert same(*(step_results(model, batches(2)) for model in models))
    assert set(lowering.state_dict(models[1]).values()) == {0}


def test_gradients_with_respect_to_some_tensors() -> None:
    found = []
    for mode in (None, "hooks"):
        model, (x,) = build_blocks(mode), batches(1)
        found.append(list(torch.autograd.grad(model(x).square().sum(), [x, model.first.weight])))
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_after_an_exception_the_bits_go_on(mode: Mode, when: str) -> None:
    found = []
    for m in (None, mode):
        model, (x,) = build_blocks(m), batches(1)
        fail_in_block(model, x, m, when)
        found.append(step_results(model, batches(2)))
    assert same(*found)


def fail_in_block(model: Blocks, x: Tensor, mode: Mode, when: str) -> None:
    """Have the second block raise, after some of its layers, in its first run or in its recomputation."""
    runs = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if when == "forward" or (mode is not None and len(runs) == 2):
            raise KeyboardInterrupt

    block = model.blocks[1]
    assert isinstance(block.act, nn.Module)
    handle = block.act.register_forward_pre_hook(fail)
    with contextlib.suppress(KeyboardInterrupt):
        model(x).sum().backward()
    handle.remove()
    assert runs


def test_a_region_that_does_more_the_second_time_is_refused() -> None:
    model, runs = ql.lower(two_linear(8), "bfp8", "bfp8"), []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        return model(model(x)) if len(runs) > 1 else model(x)  # type: ignore[no-any-return]

    y = checkpoint(run, torch.randn(4, 8, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="'0' runs more often in the recomputation of a checkpointed region"):
        y.sum().backward()


@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_within_a_region(early: bool) -> None:
    """It recomputes the region before its first forward has ended."""
    found = []
    for mode in (None, "hooks"):
        model = ql.lower(nn.Sequential(two_linear(), two_linear()), "bfp8", "bfp8")
        for i, p in enumerate(model.parameters()):
            nn.init.normal_(p, 0, 0.1, torch.Generator().manual_seed(i))

        def run(x: Tensor, model: nn.Sequential = model) -> Tensor:
            y = model[0](x)
            if torch._C._current_graph_task_id() != -1:
                return model[1](y)  # type: ignore[no-any-return]
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return model[1](y) + g  # type: ignore[no-any-return]

        with set_checkpoint_early_stop(early):
            found.append(step_results(model, batches(2, 64), lambda x, m=mode, f=run: run_region(m, f, x)))  # type: ignore[misc]
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_rounding_to_nearest_and_full_precision(mode: Mode) -> None:
    for settings in ({"rounding": "nearest"}, {"save_codes": False}):
        models = [build_blocks(m, **settings) for m in (None, mode)]
        assert same(*(step_results(model, batches(2)) for model in models))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled_code_says_that_it_cannot(mode: Mode) -> None:
    model = ql.lower(two_linear(), "bfp8", "bfp8")
    compiled: Any = torch.compile(model, backend="aot_eager")
    y = run_region(mode, compiled, torch.randn(4, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"use torch\.compile or activation checkpointing, not both"):
        y.sum().backward()

    def run(x: Tensor) -> Any:
        return run_region(mode, model, x)

    wrapped: Any = torch.compile(run, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"use torch\.compile or activation checkpointing, not both"):
        wrapped(torch.randn(4, 64, requires_grad=True)).sum().backward()
