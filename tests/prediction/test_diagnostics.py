"""Diagnostics: ArviZ called directly, chains whose values are known, and posteriors made by hand."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.signal import lfilter
from torch import Tensor

from qlangevin import encode
from qlangevin.prediction.diagnostics import (
    Summary,
    import_arviz,
    log_likelihood,
    predictions,
    summarize,
    to_arviz,
    weights,
)

az: Any = import_arviz()


def autoregressive(phi: float, chains: int, draws: int, count: int, seed: int = 0) -> Any:
    """Stationary chains x' = φ x + √(1 - φ²) ξ of law N(0, 1), [chain, draw, count]; they are worth (1 - φ)/(1 + φ) a draw."""
    xi = np.random.default_rng(seed).standard_normal((chains, draws, count))
    xi[:, 1:] *= math.sqrt(1 - phi**2)
    return lfilter([1], [1, -phi], xi, axis=1)


@pytest.mark.parametrize("method", ["split", "rank"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_values_are_those_of_arviz(shape: tuple[int, ...], method: Any) -> None:
    x = autoregressive(0.6, 3, 51, math.prod(shape)).reshape(3, 51, *shape)
    summary = summarize(torch.from_numpy(x), method=method)
    for i, index in enumerate(np.ndindex(*shape)):
        one = x.reshape(3, 51, -1)[..., i]
        assert summary.r_hat[index] == az.rhat(one, method=method)
        assert summary.ess_bulk[index] == az.ess(one, method="bulk")
        assert summary.ess_tail[index] == az.ess(one, method="tail")
        assert summary.mcse_mean[index] == pytest.approx(az.mcse(one, method="mean"), rel=1e-12)
        assert summary.mean[index] == pytest.approx(one.mean(), abs=1e-15)
        assert summary.sd[index] == pytest.approx(one.std(ddof=1), rel=1e-12)
    assert summary.r_hat.shape == summary.mean.shape == shape
    assert summary.worst == (summary.r_hat.max(), summary.ess_bulk.min(), summary.ess_tail.min())


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_autoregressive_chains(phi: float) -> None:
    """N (1 - φ)/(1 + φ) of N draws.

    One estimate has a standard deviation of at most 13 % (φ = 0.9, measured over 200 chains) and a bias of at most 2 %, the
    mean of 20 of 3 %. 13 % off happens in less than one run of 5000.
    """
    summary = summarize(autoregressive(phi, 4, 2000, 20))
    assert summary.ess_bulk.mean() == pytest.approx(8000 * (1 - phi) / (1 + phi), rel=0.13)


@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_monte_carlo_error_covers_the_true_mean(phi: float) -> None:
    """(mean - 0)/mcse is N(0, 1): one of 60 beyond 4.5 has probability 4e-4, a mean square off by 4 standard errors 1e-4."""
    summary = summarize(autoregressive(phi, 4, 1000, 60))
    z = summary.mean / summary.mcse_mean
    assert np.abs(z).max() < 4.5
    assert (z**2).mean() == pytest.approx(1, abs=4 * math.sqrt(2 / 60))


@pytest.mark.parametrize("method", ["split", "rank"])
def test_r_hat_tells_chains_that_agree_from_chains_that_do_not(method: Any) -> None:
    """Eight halves of 500 independent draws: R-hat² - 1 is about χ²(7)/7/500, above 0.02 with probability 1e-12."""
    x = autoregressive(0, 4, 1000, 5)
    assert summarize(x, method=method).worst[0] < 1.01
    shifted = x + np.array([0, 0, 3, 3])[:, None, None]
    assert summarize(shifted, method=method).r_hat.min() > 1.5


def test_one_chain_is_split() -> None:
    x = autoregressive(0, 1, 1001, 3)
    summary = summarize(x)
    assert summary.worst[0] < 1.02  # see above, for 2 halves: χ²(1)/500 above 0.04 has probability 1e-5
    halves = np.concatenate((x[:, :500], x[:, 501:]))
    for i in range(3):
        assert summary.r_hat[i] == az.rhat(halves[..., i], method="identity")
    drifting = x + np.linspace(0, 6, 1001)[None, :, None]
    assert summarize(drifting).r_hat.min() > 1.5
    with pytest.raises(ValueError, match="draws has 1 chain, and method='rank' needs two or more; use method='split'"):
        summarize(x, method="rank")


def test_what_never_moved_is_nan_without_warnings() -> None:
    x = autoregressive(0, 2, 100, 3)
    x[..., 1] = 0.1  # whose mean is rounded
    x[0, :, 2], x[1, :, 2] = 1.0, 2.0
    summary = summarize(x)
    assert np.isnan(summary.r_hat).tolist() == [False, True, False]
    assert summary.r_hat[2] > 1e6
    assert summary.sd[1] == pytest.approx(0, abs=1e-15)
    assert summary.stuck == 1
    assert summary.worst == (summary.r_hat[2], summary.ess_bulk[[0, 2]].min(), summary.ess_tail[[0, 2]].min())
    still = summarize(np.zeros((2, 4)))
    assert still.stuck == 1
    assert all(math.isnan(value) for value in still.worst)


def test_mappings_low_precision_and_integers() -> None:
    x = torch.from_numpy(autoregressive(0, 2, 40, 1))[..., 0]
    summaries = summarize({"bf16": x.bfloat16(), "counts": (x * 10).round().long(), "coded": encode(x.float(), "bfp8")})
    assert list(summaries) == ["bf16", "counts", "coded"]
    assert all(isinstance(value, Summary) for value in summaries.values())
    assert summaries["bf16"].mean == pytest.approx(float(x.bfloat16().double().mean()))
    assert summaries["coded"].r_hat == pytest.approx(float(az.rhat(x.numpy(), method="split")), abs=0.01)


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        (np.zeros((2, 3)), "draws has 3 draws in each of 2 chains; at least 4 draws are needed"),
        (np.zeros((0, 9)), "9 draws in each of 0 chains"),
        (np.zeros(9), r"draws must be \[chain, draw, ...\], got shape \(9,\); x\[None\] is one chain"),
        (torch.tensor([[1.0, math.nan, 2.0, math.inf, 3.0]]), "2 numbers of 5 that are not: did a chain diverge?"),
        ({"w": np.zeros((2, 3))}, "w has 3 draws"),
    ],
)
def test_draws_that_are_refused(draws: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(draws)


def test_methods_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="method must be one of 'split', 'rank', got 'folded'"):
        summarize(np.zeros((2, 9)), method="folded")  # type: ignore[call-overload]


@pytest.fixture
def plots() -> Iterator[Any]:
    """pyplot that draws nowhere."""
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")
    matplotlib.use(before)


def normal_model(chains: int = 4, draws: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """(θ, log p(y|θ), y) for y ~ N(θ, 1), 30 of them, and exact draws of the posterior N(ȳ, 1/30) under a flat prior."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(30, generator=generator)
    theta = y.mean() + torch.randn(chains, draws, generator=generator) / math.sqrt(30)
    return theta, torch.distributions.Normal(theta[..., None], 1.0).log_prob(y), y


@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")  # ArviZ 0.23 with Matplotlib 3.11
def test_arviz_works_on_what_it_is_given(plots: Any) -> None:
    theta, likelihood, y = normal_model()
    data = to_arviz(
        {"0.weight": torch.stack((theta, 2 * theta), -1), "θ": theta},
        log_likelihood=likelihood, observed_data=y, sample_stats={"diverging": torch.zeros(4, 200, dtype=torch.bool)},
    )  # fmt: skip
    assert set(data.groups()) == {"posterior", "log_likelihood", "observed_data", "sample_stats"}
    assert data.sample_stats["diverging"].dtype == bool
    table = az.summary(data)
    assert list(table.index) == ["0.weight[0]", "0.weight[1]", "θ"]
    assert table.loc["θ", "mean"] == pytest.approx(float(theta.mean()), abs=1e-3)
    for plot in (az.plot_trace, az.plot_ess, az.plot_rank, az.plot_posterior):
        plot(data, var_names=["θ"])
        plots.close("all")


def test_leave_one_out_is_near_its_exact_value() -> None:
    """Without y_i the posterior is N(ȳ_-i, 1/29), so that y_i ~ N(ȳ_-i, 1 + 1/29). 800 draws estimate the sum to 0.1."""
    theta, likelihood, y = normal_model()
    rest = (y.sum() - y) / 29
    exact = torch.distributions.Normal(rest, math.sqrt(1 + 1 / 29)).log_prob(y).sum()
    data = to_arviz(theta, log_likelihood=likelihood)
    assert az.loo(data).elpd_loo == pytest.approx(float(exact), abs=0.2)
    assert az.waic(data).elpd_waic == pytest.approx(float(exact), abs=0.2)


def test_to_arviz_names_and_shapes() -> None:
    theta, likelihood, y = normal_model(chains=5, draws=4)  # more chains than draws is no mistake here
    data = to_arviz(theta, log_likelihood={"labels": likelihood}, observed_data={"labels": y})
    assert list(data.posterior) == ["x"]
    assert list(data.log_likelihood) == list(data.observed_data) == ["labels"]
    np.testing.assert_array_equal(data.posterior["x"], theta)
    with pytest.raises(ValueError, match=r"same number of chains and of draws, got .*posterior x.*\(5, 4\).*\(4, 4\)"):
        to_arviz(theta, log_likelihood=likelihood[1:])


def softmax(f: Tensor) -> Tensor:
    return f.softmax(-1)


@dataclass
class FakeChain:
    """A linear model, one weight vector a sample."""

    members: Sequence[Mapping[str, Tensor]]
    link: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.members)

    def samples(self, x: Tensor) -> Tensor:
        return torch.stack([self.link(x @ member["weight"]) for member in self.members])


@dataclass
class FakePosterior:
    chains: Sequence[FakeChain]


def fake(lengths: Sequence[int], outputs: int, link: Callable[[Tensor], Tensor] = softmax) -> FakePosterior:
    generator = torch.Generator().manual_seed(0)
    return FakePosterior(
        [
            FakeChain([{"weight": torch.randn(2, outputs, generator=generator), "bias": torch.tensor(float(i))}
                       for i in range(length)], link)
            for length in lengths
        ]
    )  # fmt: skip


X = torch.tensor([[1.0, 0.0], [0.5, -2.0], [3.0, 1.0]])


def test_predictions_are_the_last_of_each_chain() -> None:
    posterior = fake((5, 3), 4)
    p = predictions(posterior, X)
    assert p.shape == (2, 3, 3, 4)
    assert torch.equal(p[0], posterior.chains[0].samples(X)[2:])
    assert torch.equal(p[1], posterior.chains[1].samples(X))


def test_log_likelihood_of_classes() -> None:
    posterior, y = fake((3, 3), 4), torch.tensor([0, 3, 1])
    result = log_likelihood(posterior, X, y)
    expected = predictions(posterior, X).log()[:, :, torch.arange(3), y]
    torch.testing.assert_close(result, expected.double(), rtol=1e-5, atol=1e-6)
    certain = fake((2, 2), 4, link=lambda f: torch.nn.functional.one_hot(f.argmax(-1) * 0, 4).float())
    assert float(log_likelihood(certain, X, y).min()) == pytest.approx(-87.34, abs=0.01)


def test_log_likelihood_of_several_labels_is_their_sum() -> None:
    posterior, y = fake((2, 2), 3, torch.sigmoid), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]])
    p = predictions(posterior, X).double()
    expected = torch.distributions.Bernoulli(p).log_prob(y.double()).sum(-1)
    torch.testing.assert_close(log_likelihood(posterior, X, y), expected, rtol=1e-6, atol=1e-6)


def test_log_likelihood_of_gaussian_noise() -> None:
    posterior, y = fake((2, 2), 2, lambda f: f), torch.tensor([[0.0, 1.0], [2.0, 0.5], [1.0, 1.0]])
    result = log_likelihood(posterior, X, y, noise=0.25)
    expected = stats.norm.logpdf(y.numpy(), predictions(posterior, X).numpy(), 0.5).sum(-1)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_log_likelihood_refuses() -> None:
    posterior = fake((2, 2), 4)
    with pytest.raises(ValueError, match=r"probabilities \(3, 4\) and labels \(2,\)"):
        log_likelihood(posterior, X, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="these look like logits"):
        log_likelihood(fake((2, 2), 4, lambda f: f), X, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"shapes must be equal: predictions \(3, 4\) and labels \(3,\)"):
        log_likelihood(posterior, X, torch.ones(3), noise=1.0)
    for noise in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"noise must be a variance, positive and finite, got {noise}"):
            log_likelihood(posterior, X, torch.ones(3, 4), noise=noise)


def test_weights() -> None:
    posterior = fake((5, 3), 4)
    drawn = weights(posterior, ["weight", "bias"])
    assert list(drawn) == ["weight", "bias"]
    assert drawn["weight"].shape == (2, 3, 2, 4)
    assert drawn["bias"].tolist() == [[2, 3, 4], [0, 1, 2]]
    torch.testing.assert_close(drawn["weight"][0, 0], posterior.chains[0].members[2]["weight"])
    chosen = weights(posterior, {"weight": (0, slice(1, 3)), "bias": ()})
    assert torch.equal(chosen["weight"], drawn["weight"][:, :, 0, 1:3])
    assert torch.equal(chosen["bias"], drawn["bias"])
    assert torch.equal(weights(posterior, "bias")["bias"], drawn["bias"])


def test_weights_that_are_codes_are_decoded() -> None:
    codes = [torch.nn.Parameter(encode(torch.full((2, 3), float(i)), "fixed8.3")) for i in range(2)]
    drawn = weights(FakePosterior([FakeChain([{"w": code} for code in codes], softmax)]), {"w": 0})["w"]
    assert type(drawn) is Tensor
    assert drawn.tolist() == [[[0.0] * 3, [1.0] * 3]]
    assert not drawn.requires_grad


def test_unknown_weights_and_empty_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameter is called 'wieght'; near to it are weight, bias"):
        weights(fake((2, 2), 4), ["wieght"])
    for lengths in ((), (2, 0)):
        with pytest.raises(ValueError, match="a sample in each chain, got chains of lengths"):
            predictions(fake(lengths, 4), X)


@pytest.mark.slow
def test_importing_predictions_imports_no_large_library() -> None:
    names = ("diagnostics", "ensemble", "metrics", "posterior", "predictive")
    code = f"import sys, {', '.join(f'qlangevin.prediction.{name}' for name in names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert {"arviz", "matplotlib", "pandas", "rich", "scipy", "torchmetrics", "xarray"}.isdisjoint(
        loaded.stdout.split()
    )
