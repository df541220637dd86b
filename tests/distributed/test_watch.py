"""The comparison of replicas: a changed byte is found, named and an error on all ranks; the checksum behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import qlangevin as ql
from qlangevin.distributed import Ranks, ReplicasDifferError, Watch, checksum, replicate
from tests.helpers.chains import loader, make_sampler, network, train
from tests.helpers.process_groups import run_on_ranks

# ---- on ranks


@torch.no_grad()
def flip(t: Tensor, bit: int) -> None:
    words = t.view(-1).view(torch.int32)
    words[-1] ^= 1 << bit


def watched(ranks: Ranks, accumulator: str | None, odd: list[int], wire: str | None) -> list[Any]:
    """The step at which replicas were found to differ, and the error; one bit is changed on some ranks after step 4."""
    model = network()
    sampler = make_sampler(model, lr=1e-3, accumulator=accumulator, weights="bfp8" if accumulator else None)
    replicas = replicate(model, sampler, every=3, wire=wire)
    batches = loader(ranks.rank, ranks.size)
    for step in range(1, 10):
        try:
            train(replicas, sampler, batches, step)
        except ReplicasDifferError as error:
            return [step, str(error)]
        if step == 4 and ranks.rank in odd:
            weight = model.get_parameter("2.weight")
            flip(sampler.state[weight]["accumulator"] if accumulator else weight.data, 3 if accumulator else 20)
    return [step, ""]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("accumulator", "odd", "who"),
    [(None, [1], "rank 1 and"), ("fp32", [2], "rank 2 and"), (None, [0], "ranks 1, 2 and"), (None, [], "")],
)
def test_a_changed_byte_is_an_error_on_all_ranks_at_the_next_comparison(
    accumulator: str | None, odd: list[int], who: str
) -> None:
    found = run_on_ranks(watched, 3, accumulator, odd, "bfp8/64" if odd == [1] else None)
    assert found[0] == found[1] == found[2]
    step, message = found[0]
    assert step == (6 if odd else 9)
    what = "the accumulator of '2.weight'" if accumulator else "parameter '2.weight'"
    assert not odd or message.startswith(f"after 6 steps {what} is not the same on all ranks: {who} rank 0 differ")


def watched_by_hand(ranks: Ranks) -> list[str]:
    """Errors of a watch over models that are not replicated, one in floats and one packed."""
    found = []
    for packed in (False, True):
        model = ql.pack(network(), "bfp8") if packed else network()
        watch = Watch(model, make_sampler(model), every=0)
        watch.check()
        if ranks.rank == 1:
            p = model.get_parameter("0.bias")
            raw = p.codes if isinstance(p, ql.QTensor) else p.data.view(torch.int32)
            raw[-1] ^= 1
        watch()  # every=0 never compares
        try:
            watch.check()
        except ReplicasDifferError as error:
            found.append(str(error))
    return found


@pytest.mark.distributed
def test_a_watch_needs_no_replicas() -> None:
    for found in run_on_ranks(watched_by_hand, 2):
        assert len(found) == 2
        assert all("parameter '0.bias'" in message and "rank 1 and rank 0" in message for message in found)


# ---- the checksum

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64)


def random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 3000), st.sampled_from(DTYPES), st.integers(0, 2**32), st.data())
def test_one_flipped_bit_changes_the_checksum(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    raw = random_bytes(size * dtype.itemsize, seed)
    before = checksum(raw.view(dtype))
    assert before == checksum(raw.clone().view(dtype))
    if size:
        at, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
        raw[at] ^= 1 << bit
        assert checksum(raw.view(dtype)) != before


@given(st.integers(1, 3000), st.sampled_from(["bfp8", "bfp8/32", "bfp4/tensor", "fixed8.3", "bfp16"]), st.data())
def test_one_flipped_bit_of_codes_or_exponents_changes_the_checksum(
    size: int, format: str, data: st.DataObject
) -> None:
    q = ql.encode(torch.randn(size, generator=torch.Generator().manual_seed(size)), format)
    before = checksum(q)
    parts = [q.codes] if q.exponents is None else [q.codes, q.exponents]
    raw = data.draw(st.sampled_from(parts)).view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(q) != before


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=50), st.data())
@example([0, -1], None)
def test_swapped_words_change_the_checksum(words: list[int], data: st.DataObject | None) -> None:
    i = data.draw(st.integers(0, len(words) - 1)) if data else 0
    j = data.draw(st.integers(0, len(words) - 1)) if data else 1
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert (checksum(torch.tensor(words)) == checksum(torch.tensor(swapped))) == (words == swapped)


@given(st.integers(0, 2**63 - 1))
def test_two_words_never_share_a_checksum(word: int) -> None:
    """Not even a word and the one whose mixed bits are its complement: an arithmetic shift would map both to one sum."""
    multiplier = 0x2545F4914F6CDD1D
    other = (~(word * multiplier) * pow(multiplier, -1, 2**64)) % 2**64
    other -= 2**64 * (other >= 2**63)
    assert word != other
    assert checksum(torch.tensor([word])) != checksum(torch.tensor([other]))


def test_a_checksum_covers_all_chunks_and_any_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlangevin.distributed.replicas.WORDS", 16)
    t = torch.arange(200, dtype=torch.float32)
    swapped = t.clone()
    swapped[[0, 150]] = swapped[[150, 0]]
    moved = torch.cat((t[32:64], t[:32], t[64:]))  # two chunks of 16 words
    assert len({checksum(t), checksum(swapped), checksum(moved)}) == 3
    shifted = torch.cat((torch.zeros(1), t))[1:]  # does not begin with a word
    assert checksum(shifted) == checksum(t)
    for offset in (0, 4):  # memory that is not aligned
        memory = bytearray(offset) + bytearray(4) + bytearray(t.numpy().tobytes())
        assert checksum(torch.frombuffer(memory, dtype=torch.float32, offset=offset)[1:]) == checksum(t)
    assert checksum(t.view(10, 20).t()) == checksum(t.view(10, 20).t().contiguous()) != checksum(t)
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(-3.0))
