"""`native.disabled`: for one thread, in any order of ends, and over as soon as it ends."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qlangevin import native

pytestmark = pytest.mark.skipif(not native.available, reason="no compiled kernels")


def enabled() -> bool:
    return native.enabled_for(torch.ones(1))


def in_thread(function: Callable[[], Any]) -> list[Any]:
    """Return what a function returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


def test_it_nests_and_ends() -> None:
    assert enabled()
    with native.disabled(), native.disabled():
        assert not enabled()
    assert enabled()
    assert not native.enabled_for(torch.ones(1, dtype=torch.float64))


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), native.disabled():
        _ = 1 / int(enabled())
    assert enabled()


def test_contexts_of_one_thread_may_end_in_any_order() -> None:
    def generator() -> Iterator[bool]:
        with native.disabled():
            yield enabled()

    first, second = generator(), generator()
    assert not next(first)
    assert not next(second)
    assert next(first, None) is None
    assert not enabled()  # the second lasts
    assert next(second, None) is None
    assert enabled()


def test_threads_do_not_disturb_one_another() -> None:
    # Two threads enter one after the other and leave in the same order.
    entered, left, seen = [threading.Event() for _ in range(2)], threading.Event(), dict[int, bool]()

    def first() -> None:
        with native.disabled():
            entered[0].set()
            entered[1].wait(60)
        left.set()
        seen[0] = enabled()

    def second() -> None:
        entered[0].wait(60)
        with native.disabled():
            entered[1].set()
            left.wait(60)
            seen[1] = enabled()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    entered[1].wait(60)
    assert enabled()  # this thread has not asked for anything
    for thread in threads:
        thread.join()
    assert seen == {0: True, 1: False}
    assert enabled()
    assert in_thread(enabled) == [True]


def test_other_threads_keep_their_kernels_and_heirs_of_the_context_do_not() -> None:
    with native.disabled():
        assert in_thread(enabled) == [True]
        inherited = contextvars.copy_context()
        assert not inherited.run(enabled)
        assert asyncio.run(asyncio.to_thread(enabled)) is False
    assert inherited.run(enabled)


def test_it_may_end_in_another_thread() -> None:
    context = native.disabled()
    context.__enter__()
    assert not enabled()
    in_thread(lambda: context.__exit__(None, None, None))
    assert enabled()


def test_the_backward_of_a_cpu_graph_runs_within_it() -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: seen.append(enabled()))
    with native.disabled():
        (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert seen == [False, True]
