"""Random bits: the published generator, its layout, and the numbers made from it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlangevin import Key, native
from qlangevin.quantization import random

# The known answers of Philox4x32 published with the generator (Random123, kat_vectors).
ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN = [
    (7, ((0, 0, 0, 0), (0, 0)), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, ((0, 0, 0, 0), (0, 0)), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ((ONES,) * 4, (ONES,) * 2), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "given_", "answer"), KNOWN)
def test_philox_gives_the_published_answers(
    rounds: int, given_: tuple[tuple[int, int, int, int], tuple[int, int]], answer: tuple[int, ...]
) -> None:
    assert random.philox(*given_, rounds) == answer
    counter, key = given_
    tensors = tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    assert tuple(int(word) for word in random.philox(*tensors, rounds)) == answer  # type: ignore[arg-type]


def test_an_element_takes_the_word_of_its_counter() -> None:
    key = Key(5, 6, 7)
    drawn = random.words(key, 1000, random.NOISE).tolist()
    for i in (0, 1, 15, 16, 63, 64, 100, 999):
        tile, k, lane = i // 64, i % 64 // 16, i % 16
        assert drawn[i] == random.philox((16 * tile + lane, random.NOISE << 24, 7, 0), key.bits)[k]


@given(st.integers(1, 400), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_an_element_does_not_depend_on_how_many_are_drawn(count: int, seed: int, step: int) -> None:
    key = Key(seed, 3, step)
    assert torch.equal(random.uniform(key, count), random.uniform(key, 500)[:count])
    assert torch.equal(random.normal(key, count), random.normal(key, 500)[:count])


def test_everything_in_the_key_matters() -> None:
    keys = [Key(0), Key(1), Key(0, 1), Key(0, 0, 1), Key(2**63), Key(0, 2**63), Key(0, 0, 2**33), Key(0).fold(0)]
    drawn = [random.words(key, 64) for key in keys] + [random.words(Key(0), 64, random.NOISE)]
    assert len({tuple(words.tolist()) for words in drawn}) == len(drawn)
    assert Key(0).at(9) == Key(0, 0, 9)
    assert len({Key(4).fold(i).stream for i in range(1000)}) == 1000


def test_uniforms_are_uniform() -> None:
    # 64 cells, 2^20 draws: the chi-square statistic has mean 63 and standard deviation 11.2; 130 is exceeded with
    # probability below 1e-6.
    u = random.uniform(Key(1), 2**20)
    assert u.min() > 0
    assert u.max() < 1
    assert torch.equal(1 - (1 - u), u)  # u and 1 - u are on the same grid
    counts = torch.histc(u, 64, 0, 1).double()
    assert float(((counts - 2**14) ** 2 / 2**14).sum()) < 130


def test_normals_are_normal_and_bounded() -> None:
    # Four moments of 2^20 draws; each z-score beyond 5 has probability 6e-7.
    n = 2**20
    xi = random.normal(Key(1), n).double()
    scores = [xi.mean() * n**0.5, (xi.square().mean() - 1) * (n / 2) ** 0.5]
    scores += [xi.pow(3).mean() * (n / 15) ** 0.5, (xi.pow(4).mean() - 3) * (n / 96) ** 0.5]
    assert all(abs(float(z)) < 5 for z in scores)
    pairs = xi.view(-1, 2, 2, 16)
    assert abs(float((pairs[:, :, 0] * pairs[:, :, 1]).mean())) * (n / 2) ** 0.5 < 5
    assert float(xi.abs().max()) < random.NORMAL_BOUND


def test_the_bound_of_normals_is_that_of_the_least_uniform() -> None:
    rho = random._negative_log(torch.tensor([0])).sqrt().item()
    assert math.sqrt(2) * rho <= random.NORMAL_BOUND
    assert math.sqrt(2) * rho + 1e-4 > random.NORMAL_BOUND


def test_normals_are_good_to_a_millionth() -> None:
    key, count = Key(3, 1, 4), 2**18
    pairs = random.words(key, count, random.NOISE).view(-1, 2, 2, 16)
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    rho = (-2 * torch.log(((a >> 1).double() + 0.5) / 2**31)).sqrt()
    angle = ((b >> 2) - 2**29).double() * (math.pi / 2**31) + math.pi / 4
    signs = (1 - 2 * (b & 1)).double(), (1 - (b & 2)).double()
    exact = torch.stack((rho * angle.cos() * signs[0], rho * angle.sin() * signs[1]), 2).view(-1)
    assert float((random.normal(key, count).double() - exact).abs().max()) < 1.2e-6


def test_the_logarithm_keeps_its_digits_at_both_ends() -> None:
    k = torch.cat((torch.arange(2000), 2**31 - 1 - torch.arange(2000), torch.arange(0, 2**31, 2**20 + 7)))
    exact = -torch.log1p(-(2**31 - 0.5 - k.double()) / 2**31)
    assert float((random._negative_log(k).double() / exact - 1).abs().max()) < 4e-7


@pytest.mark.skipif(not native.available, reason="no compiled kernels")
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 1025, 100_003])
def test_the_kernels_draw_the_same_bits(count: int, every_level: str, threads: int) -> None:
    key = Key(2**64 - 1, 3, 2**40)
    for purpose in (random.ROUNDING, random.ACTIVATION, random.ERROR):
        assert torch.equal(native.draw(key, count, purpose, normal=False), random.centered(key, count, purpose))
    assert torch.equal(native.draw(key, count, random.NOISE, normal=True), random.normal(key, count))


@pytest.mark.parametrize("arguments", [(-1,), (2**64,), (0, -1), (0, 0, 1.5), (True,)])
def test_a_key_is_made_of_64_bit_integers(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be an integer between 0"):
        Key(*arguments)


def test_centered_numbers_have_their_digits_near_zero() -> None:
    # P(0 < h < p) is p: h takes the odd multiples of 2^-32, each with the same probability, to the rounding of float32.
    drawn = random.words(Key(3), 1 << 16).double()
    h = random.centered(Key(3), 1 << 16).double()
    odd = torch.where(drawn % 2 == 1, drawn, drawn + 1)
    exact = torch.where(odd < 2.0**31, odd, odd - 2.0**32) * 2.0**-32
    assert torch.allclose(h, exact, rtol=2.0**-24, atol=0)
    assert bool((h.abs() <= 0.5).all())
    assert float(h.abs().min()) < 2.0**-15


@pytest.mark.parametrize("purpose", [random.ACTIVATION, random.ERROR])
def test_narrow_numbers_have_sixteen_bits_and_then_the_rest(purpose: int) -> None:
    count = 1 << 14
    h, rest = random.centered(Key(3), count, purpose).double(), random.words(Key(3), count, random.NARROW[purpose])
    halves = random.words(Key(3), count // 2, purpose).view(-1, 1, random.TILE)
    first = torch.cat((halves & 0xFFFF, halves >> 16), 1).view(-1).double()
    first = torch.where(first < 2.0**15, first, first - 2.0**16)
    exact = (first + (rest.double() + 0.5) * 2.0**-32) * 2.0**-16
    assert torch.allclose(h, exact, rtol=2.0**-23, atol=2.0**-40)
