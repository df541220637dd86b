"""A process in which Triton interprets the kernels of GPUs on CPU tensors: ``python -m tests.helpers.interpreted_chains``.

Chains run with them and with the CPU's own kernels, and must have the same bits. It prints a line for each.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qlangevin import SGLD, gpu
from tests.helpers.deferred_kernels import NoWaiting
from tests.sampling.test_deferred import bits, gradients, network, run, same, steps_of

Chain = tuple[Any, SGLD]
KINDS: dict[str, tuple[str | None, torch.dtype, dict[str, Any]]] = {
    "fixed point": (None, torch.float32, {"weights": "fixed8.5", "gradients": "fixed8.6"}),
    "accumulator": (None, torch.float32, {"weights": "bfp8", "gradients": "bfp8", "accumulator": "fp32"}),
    "bfloat16": (None, torch.bfloat16, {}),
    "packed": ("fixed8.5", torch.float32, {"accumulator": "fp32"}),
    "two codes in a byte": ("fixed4.2", torch.float32, {}),
}


def start(kind: str) -> Chain:
    packed, dtype, settings = KINDS[kind]
    model = network(packed).to(dtype)
    return model, SGLD(model.named_parameters(), 0.1, 1000, weight_decay=1e-3, **settings)


def check_bits(kind: str) -> None:
    """Compare a chain that begins there and ends here with one that is here all the time."""
    reference, there, here = start(kind), start(kind), start(kind)
    run(reference, range(4))
    with gpu.interpreted():
        run(there, range(1))
        for step in (1, 2):
            gradients(there[0], step)
            with NoWaiting():
                there[1].step()
        saved = there[0].state_dict(), there[1].state_dict()
    here[0].load_state_dict(saved[0])
    here[1].load_state_dict(saved[1])
    run(here, range(3, 4))
    assert same(bits(reference), bits(here))


def check_failed_step() -> None:
    """A gradient that is not finite turns steps into nothing until the error was raised."""
    reference, (model, sampler) = start("fixed point"), start("fixed point")
    run(reference, range(2))
    with gpu.interpreted():
        run((model, sampler), range(1))
        kept = bits((model, sampler))
        gradients(model, 1)
        model[2].weight.grad[0, 0] = torch.inf
        sampler.step()
        assert same(bits((model, sampler)), kept)
        with pytest.raises(FloatingPointError, match=r"'2.weight' held an infinity"):
            sampler.check()
        assert steps_of(sampler) == [1] * 4
        run((model, sampler), range(1, 2))
        sampler.check()
    assert same(bits(reference), bits((model, sampler)))


def check_overwritten() -> None:
    """Weights written by others begin a new accumulator, rounded with the bits of the step on the device."""

    def chain() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 0.1, 1000, weights="fixed8.5", accumulator="fixed16.12")

    def write(chain: Chain) -> None:
        run(chain, range(1))
        with torch.no_grad():
            chain[0][0].weight.fill_(0.71875)
            chain[0][0].bias.add_(1 / 3)
        run(chain, range(1, 2))

    one, two = chain(), chain()
    write(one)
    with gpu.interpreted():
        write(two)
    assert same(bits(one), bits(two))


def check_compiled() -> None:
    """A compiled step runs the same kernels."""
    one, two = start("fixed point"), start("fixed point")
    run(one, range(2))
    with gpu.interpreted():
        step: Callable[[], None] = torch.compile(two[1].step, fullgraph=True, backend="aot_eager")
        for number in range(2):
            gradients(two[0], number)
            step()
        two[1].check()
    assert same(bits(one), bits(two))


def main() -> None:
    """Check everything."""
    for kind in KINDS:
        check_bits(kind)
        print(kind)
    for check in (check_failed_step, check_overwritten, check_compiled):
        check()
        print(check.__name__)


if __name__ == "__main__":
    main()
