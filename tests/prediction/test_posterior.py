"""Posteriors: what is opened, what is averaged, loaders, chains, messages; and a posterior that is known exactly."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import qlangevin as ql
from qlangevin import diagnostics, metrics

Posterior = ql.Posterior


def model_of(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def stored(path: Path, count: int = 6, seed: int = 0, model: nn.Module | None = None) -> ql.SampleStore:
    """Samples of a model, drawn at random."""
    model = model_of() if model is None else model
    with ql.SampleStore.create(path, model) as store:
        grow(store, model, count, seed)
    return store


def grow(store: ql.SampleStore, model: nn.Module, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
        store.append(model)


X = torch.randn(23, 4, generator=torch.Generator().manual_seed(9))
LABELS = torch.randint(3, (23,), generator=torch.Generator().manual_seed(9))


@pytest.fixture
def store(tmp_path: Path) -> ql.SampleStore:
    return stored(tmp_path / "run")


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Posterior:
    return Posterior.open(stored(tmp_path_factory.mktemp("store") / "run"), model_of())


@pytest.fixture
def two(tmp_path: Path) -> Posterior:
    """Two chains, of 6 and 4 samples."""
    stores = [stored(tmp_path / "a"), stored(tmp_path / "b", 4, seed=1)]
    return Posterior.open(stores, model_of())


def same(a: Posterior, b: Posterior) -> bool:
    return len(a) == len(b) and torch.equal(a.samples(X), b.samples(X))


# ---- opening


def test_a_path_a_store_or_its_samples(store: ql.SampleStore) -> None:
    model = model_of()
    first = Posterior.open(store, model)
    assert len(first) == 6
    assert same(Posterior.open(store.path, model), first)
    assert same(Posterior.open(str(store.path), model), first)
    assert same(Posterior.open(list(store), model), first)
    assert same(Posterior.open(store[:], model), first)
    assert same(Posterior.open([store], model), first)
    assert same(Posterior.open((store.path,), model), first)
    assert same(Posterior.open([store[:3], store[3:]], model), first)
    assert repr(first) == "Posterior(Sequential, 6 samples of one chain, softmax)"


def test_a_slice_is_a_posterior_over_those_samples(store: ql.SampleStore) -> None:
    model = model_of()
    whole = Posterior.open(store, model, link="sigmoid", vectorize=False)
    for some in (slice(5, None), slice(None, None, 2), slice(-2, None), slice(1, 4), slice(None, None, -1)):
        cut = whole[some]
        assert same(cut, Posterior.open(store[some], model, link="sigmoid", vectorize=False))
        assert torch.equal(cut.samples(X), whole.samples(X)[range(6)[some]])
        assert cut.link == "sigmoid"
    with pytest.raises(ValueError, match="no sample would be left"):
        whole[6:]
    with pytest.raises(TypeError, match=r"cut by slices, such as posterior\[10:\], got 2"):
        whole[2]  # type: ignore[index]


def test_several_stores_are_averaged_as_one(tmp_path: Path) -> None:
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b", 4, seed=1)
    model = model_of()
    stores: list[Any] = [a, b.path]
    both = Posterior.open(stores, model)
    assert len(both) == 10
    assert same(both, Posterior.open([*a, *b], model))
    means = [Posterior.open(one, model).predict(X) for one in (a, b)]
    torch.testing.assert_close(both.predict(X), (6 * means[0] + 4 * means[1]) / 10)


def test_chains_of_different_formats_are_averaged(tmp_path: Path) -> None:
    packed, plain = ql.pack(model_of(), "bfp8"), model_of()
    a, b = stored(tmp_path / "a", model=packed), stored(tmp_path / "b", model=plain)
    for model in (packed, plain):
        both = Posterior.open([a, b], model)
        torch.testing.assert_close(both.samples(X), torch.cat([chain.samples(X) for chain in both.chains]))


def test_chains_and_slices_of_each(two: Posterior) -> None:
    assert [len(chain) for chain in two.chains] == [6, 4]
    assert torch.equal(torch.cat([chain.samples(X) for chain in two.chains]), two.samples(X))
    cut = two[1::2]
    assert [len(chain) for chain in cut.chains] == [3, 2]
    assert torch.equal(cut.samples(X), two.samples(X)[[1, 3, 5, 7, 9]])
    assert [sample.index for sample in two[-1:].members] == [5, 3]


def test_a_slice_that_leaves_a_chain_without_samples(two: Posterior) -> None:
    """It is refused, or that chain is gone: what it gives can be used either way."""
    try:
        cut = two[5:]
    except ValueError:
        return
    assert [len(chain) for chain in cut.chains] == [1]
    assert diagnostics.predictions(cut, X).shape == (1, 1, 23, 3)


def test_a_generator_of_stores_loses_none(tmp_path: Path) -> None:
    for i in range(3):
        stored(tmp_path / f"chain{i}", 2, seed=i)
    for stores in (sorted(tmp_path.glob("chain*")), (tmp_path / f"chain{i}" for i in range(3))):
        assert len(Posterior.open(stores, model_of())) == 6


def test_a_posterior_keeps_its_samples_while_the_store_grows(tmp_path: Path) -> None:
    model = model_of()
    with ql.SampleStore.create(tmp_path / "run", model) as writer:
        grow(writer, model, 3, 0)
        reader = ql.SampleStore.open(tmp_path / "run")
        early = Posterior.open(reader, model)
        of_writer = Posterior.open(writer, model)
        grow(writer, model, 2, 1)
        assert len(reader) == 5
        assert len(early) == len(of_writer) == 3
        late = Posterior.open(reader, model)
        assert torch.equal(early.samples(X), late[:3].samples(X))
        assert torch.equal(early.samples(X), of_writer.samples(X))
        assert len(late) == 5


def test_a_wrapped_model_is_the_model_in_it(store: ql.SampleStore) -> None:
    model = model_of()
    assert same(Posterior.open(store, nn.DataParallel(model)), Posterior.open(store, model))


# ---- messages


def test_stores_without_samples_are_refused(tmp_path: Path, store: ql.SampleStore) -> None:
    empty = stored(tmp_path / "empty", 0)
    for stores in (empty, empty.path, [], [store, empty], store[6:]):
        with pytest.raises(ValueError, match="a posterior needs samples"):
            Posterior.open(stores, model_of())
    with pytest.raises(FileNotFoundError, match=r"there is no store in .*nowhere"):
        Posterior.open(tmp_path / "nowhere", model_of())


def test_another_model_is_refused_and_the_message_names_the_tensors(tmp_path: Path, store: ql.SampleStore) -> None:
    with pytest.raises(ValueError, match=r"of another model: '2.weight' is .*\[3, 8\] there and .*\[5, 8\] in the mod"):
        Posterior.open(store, model_of(5))
    with pytest.raises(ValueError, match=r"'0.weight' is missing in the model.*'weight' is in the model only"):
        Posterior.open(store, nn.Linear(4, 8))
    with pytest.raises(ValueError, match=r"float32.* there and .*float64"):
        Posterior.open(store, model_of().double())
    other = stored(tmp_path / "other", model=model_of(5))
    with pytest.raises(ValueError, match=r"other is of another model: '2.weight'"):
        Posterior.open([store, other], model_of())


def test_samples_of_another_store_in_the_list_are_checked_too(tmp_path: Path, store: ql.SampleStore) -> None:
    other = stored(tmp_path / "other", model=model_of(5))
    with pytest.raises(ValueError, match=r"other is of another model: '2.weight'"):
        Posterior.open([store[0], other[0]], model_of())


def test_one_sample_alone(store: ql.SampleStore) -> None:
    """A sample is a mapping: its names are not taken for folders."""
    assert same(Posterior.open(store[2], model_of()), Posterior.open(store[2:3], model_of()))
    with pytest.raises(TypeError, match="must be stores"):
        Posterior.open(5, model_of())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "logit"}, "link must be one of 'softmax', 'sigmoid', 'identity', got 'logit'"),
        ({"link": None}, "link must be one of .* got None"),
        ({"noise": 0.1}, "noise must be a variance, and goes with link='identity', got 0.1 with link='softmax'"),
        ({"noise": 0.1, "link": "sigmoid"}, "got 0.1 with link='sigmoid'"),
        ({"noise": -1.0, "link": "identity"}, "noise must be a variance.*got -1.0"),
        ({"noise": math.nan, "link": "identity"}, "noise must be a variance.*got nan"),
        ({"noise": math.inf, "link": "identity"}, "noise must be a variance.*got inf"),
        ({"batch_norm": "train"}, "batch_norm must be 'stored' or a loader, got 'train'"),
    ],
)
def test_options_that_are_refused(store: ql.SampleStore, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Posterior.open(store, model_of(), **options)


class Outputs(nn.Linear):
    """Gives what it is told to."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"dict": {"logits": y}, "tuple": (y, y), "flat": y[:, 0], "one": y[:, :1]}[self.kind]


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_models_whose_outputs_cannot_be_averaged(tmp_path: Path, vectorize: bool | None) -> None:
    for kind in ("dict", "tuple"):
        posterior = Posterior.open(stored(tmp_path / kind, model=Outputs(kind)), Outputs(kind), vectorize=vectorize)
        with pytest.raises(TypeError, match=f"the model must return a tensor of floating-point numbers, got {kind}"):
            posterior.predict(X)
    for kind, shape in (("flat", r"\(23,\)"), ("one", r"\(23, 1\)")):
        store, model = stored(tmp_path / kind, model=Outputs(kind)), Outputs(kind)
        with pytest.raises(ValueError, match=f"two classes or more, got {shape}; for yes or no take link='sigmoid'"):
            Posterior.open(store, model, vectorize=vectorize).predict(X)
        assert Posterior.open(store, model, link="sigmoid", vectorize=vectorize).predict(X).shape[0] == 23


# ---- predictions


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_average_of_each_link(store: ql.SampleStore, vectorize: bool) -> None:
    outputs = Posterior.open(store, model_of(), link="identity", vectorize=vectorize).samples(X)
    softmax = Posterior.open(store, model_of(), vectorize=vectorize)
    sigmoid = Posterior.open(store, model_of(), link="sigmoid", vectorize=vectorize)
    identity = Posterior.open(store, model_of(), link="identity", noise=0.25, vectorize=vectorize)
    for one, each in ((softmax, outputs.softmax(2)), (sigmoid, outputs.sigmoid()), (identity, outputs)):
        torch.testing.assert_close(one.samples(X), each, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.predict(X), each.mean(0), rtol=1e-6, atol=1e-6)
        assert torch.equal(one.uncertainty(X).mean, one.predict(X))
    u = identity.uncertainty(X)
    np.testing.assert_allclose(u.epistemic, outputs.double().numpy().var(0), rtol=1e-5)
    torch.testing.assert_close(u.total, u.epistemic + 0.25)
    assert bool((u.aleatoric == 0.25).all())
    shapes = [one.uncertainty(X).total.shape for one in (softmax, sigmoid, identity)]
    assert shapes == [(23,), (23, 3), (23, 3)]


def test_pixels_are_classified_one_by_one(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(4, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    posterior = Posterior.open(stored(tmp_path / "run", model=model), model)
    u = posterior.uncertainty(x)
    assert u.mean.shape == (4, 3, 5, 6)
    assert u.total.shape == u.epistemic.shape == (4, 5, 6)
    torch.testing.assert_close(u.mean.sum(1), torch.ones(4, 5, 6))
    labels = torch.randint(3, (4, 5, 6), generator=torch.Generator().manual_seed(0))
    assert metrics.evaluate(posterior.predict_loader([(x, labels)]))["count"] == 120


def test_no_examples(posterior: Posterior) -> None:
    assert posterior.predict(X[:0]).shape == (0, 3)
    assert posterior.uncertainty(X[:0]).total.shape == (0,)


class TwoInputs(nn.Linear):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(first) - 2 * super().forward(second)


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_inputs_are_a_tensor_a_tuple_or_a_dict(tmp_path: Path, vectorize: bool | None) -> None:
    store, model = stored(tmp_path / "run", model=TwoInputs(4, 3)), TwoInputs(4, 3)
    posterior = Posterior.open(store, model, vectorize=vectorize, link="identity")
    a, b = X, X.flip(0)
    expected = torch.stack([nn.functional.linear(a - 2 * b, s["weight"], -s["bias"]) for s in store])
    for inputs in ((a, b), [a, b], {"first": a, "second": b}, {"second": b, "first": a}):
        torch.testing.assert_close(posterior.samples(inputs), expected, rtol=1e-4, atol=1e-4)
        pairs = list(posterior.predict_loader([(inputs, LABELS)]))
        torch.testing.assert_close(pairs[0][0], expected.mean(0), rtol=1e-4, atol=1e-4)
        assert pairs[0][1] is LABELS
    named: list[Any] = list(posterior.predict_loader([{"first": a, "second": b}]))
    torch.testing.assert_close(named[0], expected.mean(0), rtol=1e-4, atol=1e-4)


# ---- loaders


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), limit=st.sampled_from([1, 7, 512]))
def test_batches_of_any_size_are_predicted_as_all_together(posterior: Posterior, sizes: list[int], limit: int) -> None:
    x = X.repeat(4, 1)[: sum(sizes)]
    labels = torch.arange(len(x))
    batches = list(zip(x.split(sizes), labels.split(sizes), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qlangevin.prediction.posterior.TOGETHER", limit)
        pairs = list(posterior.predict_loader(batches))
        uncertain = list(posterior.uncertainty_loader(batches))
    assert [len(p) for p, _ in pairs] == sizes
    torch.testing.assert_close(torch.cat([p for p, _ in pairs]), posterior.predict(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([y for _, y in pairs]), labels)
    whole = posterior.uncertainty(x)
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([u[i] for u, _ in uncertain]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_shuffled_loader_is_gone_through_once(store: ql.SampleStore, vectorize: bool) -> None:
    """Each batch meets all samples before the next is asked for: no second pass in another order."""
    posterior = Posterior.open(store, model_of(), vectorize=vectorize)
    expected = posterior.predict(X)
    shuffled = ql.Loader(TensorDataset(X, torch.arange(23)), batch_size=5, seed=3)
    pairs = list(posterior.predict_loader(shuffled))
    assert shuffled.steps == 0  # looking is not training
    order = torch.cat([i for _, i in pairs])
    assert not torch.equal(order, torch.arange(23))
    torch.testing.assert_close(torch.cat([p for p, _ in pairs]), expected[order], rtol=1e-5, atol=1e-6)
    once = (batch for batch in DataLoader(TensorDataset(X), batch_size=4))  # lists of one thing
    torch.testing.assert_close(torch.cat(list(posterior.predict_loader(once))), expected, rtol=1e-5, atol=1e-6)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def test_a_dataset_without_a_length(posterior: Posterior) -> None:
    """A DataLoader over one has a __len__ that raises."""
    found = torch.cat(list(posterior.predict_loader(DataLoader(Stream(), batch_size=4))))
    torch.testing.assert_close(found, posterior.predict(X), rtol=1e-5, atol=1e-6)


def test_an_empty_loader_gives_nothing(posterior: Posterior) -> None:
    assert list(posterior.predict_loader([])) == []
    with pytest.raises(ValueError, match="predictions has no batches"):
        metrics.evaluate(posterior.predict_loader([]))


def test_a_batch_of_three_things_is_refused(posterior: Posterior) -> None:
    with pytest.raises(ValueError, match="inputs, or inputs and labels, got 3 things; several inputs go into a tuple"):
        list(posterior.predict_loader([(X, X, LABELS)]))


def test_a_loader_that_fails_says_so(posterior: Posterior) -> None:
    def failing() -> Iterator[Tensor]:
        yield X
        raise OSError("no such image")

    with pytest.raises(OSError, match="no such image"):
        list(posterior.predict_loader(failing()))


def test_nothing_is_drawn_but_by_the_loader(posterior: Posterior) -> None:
    before = torch.get_rng_state()
    list(posterior.predict_loader([(X, LABELS)] * 3))
    posterior.uncertainty(X)
    assert torch.equal(torch.get_rng_state(), before)
    assert not posterior.predict(X).requires_grad


def test_a_bar_is_shown_on_a_terminal_only(
    posterior: Posterior, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    list(posterior.predict_loader([X] * 3))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    list(posterior.predict_loader([X] * 3))
    shown = capsys.readouterr()
    assert "averaging 6 samples" in shown.err
    assert shown.out == ""
    list(posterior.predict_loader(x for x in [X] * 3))  # nobody knows how long
    assert "averaging 6 samples" in capsys.readouterr().err
    list(posterior.predict_loader([X] * 3, progress=False))
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_full_at_the_end(posterior: Posterior, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[float] = []
    totals: list[Any] = []

    class Bar:
        def __init__(self, total: Any, label: str, shown: bool) -> None:
            totals.append(total)

        def __enter__(self) -> Any:
            return lambda label, steps: moved.append(steps)

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr("qlangevin.prediction.posterior.progress_bar", Bar)
    list(posterior.predict_loader([X] * 3))
    assert totals == [18]
    assert sum(moved) == 18


# ---- with metrics and diagnostics


def test_metrics_take_what_loaders_give(posterior: Posterior) -> None:
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=4)
    streamed = metrics.evaluate(posterior.predict_loader(loader))
    together = metrics.evaluate(posterior.predict(X), LABELS)
    assert streamed == pytest.approx(together, rel=1e-5)
    assert streamed["count"] == 23
    far = DataLoader(TensorDataset(100 * X, LABELS), batch_size=7)
    found = metrics.ood(posterior.uncertainty_loader(loader), posterior.uncertainty_loader(far))
    assert found == pytest.approx(metrics.ood(posterior.uncertainty(X), posterior.uncertainty(100 * X)), abs=0.01)
    unlabelled = posterior.uncertainty_loader([X, X])
    assert metrics.ood(unlabelled, posterior.uncertainty(X))["entropy"] == pytest.approx(0.5, abs=1e-3)


def test_diagnostics_of_two_chains(two: Posterior) -> None:
    drawn = diagnostics.predictions(two, X)
    assert drawn.shape == (2, 4, 23, 3)
    assert torch.equal(drawn[0], two.samples(X)[2:6])
    assert torch.equal(drawn[1], two.samples(X)[6:])
    likelihood = diagnostics.log_likelihood(two, X, LABELS)
    expected = drawn.double().gather(3, LABELS.expand(2, 4, 23)[..., None]).squeeze(3).log()
    torch.testing.assert_close(likelihood, expected)
    weights = diagnostics.weights(two, {"0.weight": (0, slice(2)), "2.bias": slice(None)})
    assert weights["0.weight"].shape == (2, 4, 2)
    assert torch.equal(weights["2.bias"][1], torch.stack([sample["2.bias"] for sample in two.chains[1].members]))
    summary = diagnostics.summarize(drawn)
    assert np.isfinite(summary.r_hat).all()


# ---- a posterior that is known

NOISE, PRIOR, DATA, COPIES = 0.25, 4.0, 40, 40  # σ², the precision of the weights' prior, N, and independent chains
LR, APART, DRAWS = 0.03, 40, 150


class Regression(nn.Module):
    """Chains side by side: f_c(x) = w_c·x, (example, chain)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COPIES, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DATA, 3, generator=generator)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + math.sqrt(NOISE) * torch.randn(DATA, generator=generator)


@pytest.mark.parametrize("weights", [None, "bfp16"])
def test_linear_regression_has_its_exact_posterior_predictive(tmp_path: Path, weights: str | None) -> None:
    """w | data ~ N(m, A⁻¹), A = XᵀX/σ² + λI, m = A⁻¹Xᵀy/σ²; so f(x) ~ N(x·m, xᵀA⁻¹x), and y has the variance σ² more.

    SGLD with h = lr/N on this Gaussian has the stationary covariance (A - hA²/2)⁻¹, here at most 12 % above A⁻¹: that is
    what is compared with. Means: 3 x 40 z-scores by the Monte Carlo error (which knows of autocorrelation); one beyond 4.8 has
    probability 2e-4. Variances: their mean over 40 chains, in units of its standard error, t with 39 degrees of freedom, 3 of
    them; one beyond 5 has probability 4e-5, and a variance 15 % off is found. A variance has a bias of 1/ESS, which is corrected.
    """
    x, y = regression_data()
    model = Regression()
    sampler = ql.SGLD(model.parameters(), lr=LR, num_data=DATA, weight_decay=PRIOR / DATA, weights=weights, seed=1)
    with ql.SampleStore.create(tmp_path / "run", model, sampler) as store:
        for step in range(1, APART * (DRAWS + 2) + 1):
            sampler.zero_grad()
            loss = ((model(x) - y[:, None]).square() / (2 * NOISE)).mean(0).sum()  # mean over data, a sum of chains
            loss.backward()
            sampler.step()
            if step > 2 * APART and step % APART == 0:
                store.append(model)

    exact = (x.T @ x).double() / NOISE + PRIOR * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(exact, (x.T @ y).double() / NOISE)
    h = LR / DATA
    assert h * float(torch.linalg.eigvalsh(exact).max()) < 0.2
    points = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [1.0, -1.0, 2.0]])
    variances = [
        (points.double() @ torch.linalg.inv(a) * points.double()).sum(1) for a in (exact, exact - h / 2 * exact @ exact)
    ]
    assert float((variances[1] / variances[0]).max()) < 1.12

    u = Posterior.open(store, model, link="identity", noise=NOISE).uncertainty(points)
    summary = diagnostics.summarize(Posterior.open(store, model, link="identity").samples(points)[None])
    z = (u.mean.numpy() - (points.double() @ mean).numpy()[:, None]) / summary.mcse_mean
    assert np.abs(z).max() < 4.8
    assert 0.6 < (z**2).mean() < 1.5  # χ²(120)/120 has a standard deviation of 0.13
    unbiased = u.epistemic.double().numpy() / (1 - 1 / summary.ess_bulk.mean())
    t = (unbiased.mean(1) - variances[1].numpy()) / (unbiased.std(1, ddof=1) / math.sqrt(COPIES))
    assert np.abs(t).max() < 5
    assert unbiased.mean(1) == pytest.approx(variances[0].numpy(), rel=0.15)
    torch.testing.assert_close(u.total, u.epistemic + NOISE)


class InPlace(nn.Module):
    """Centres its input where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.sub_(x.mean()))
        return y


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_a_model_that_writes_into_its_input_is_refused(tmp_path: Path, vectorize: bool | None) -> None:
    model = InPlace()
    posterior = Posterior.open(stored(tmp_path / "run", model=model), model, vectorize=vectorize)
    with pytest.raises(ValueError, match="changes its input in place"):
        posterior.predict(torch.randn(5, 4))


@pytest.mark.parametrize("vectorize", [True, False])
def test_threads_take_turns_with_the_model(store: ql.SampleStore, vectorize: bool) -> None:
    model = model_of()
    before, posterior = [p.clone() for p in model.parameters()], Posterior.open(store, model, vectorize=vectorize)
    expected = posterior.predict(X)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: posterior.predict(X), range(40)))
    assert all(torch.equal(p, expected) for p in found)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert model.training


@pytest.mark.parametrize("vectorize", [True, False])
def test_predictions_in_inference_mode(tmp_path: Path, vectorize: bool) -> None:
    model = ql.pack(model_of(), weights="bfp8")
    with ql.SampleStore.create(tmp_path, model) as store:
        store.append(model)
        store.append(model)
    posterior = Posterior.open(tmp_path, model, vectorize=vectorize)
    expected = posterior.predict(X)
    with torch.inference_mode():
        torch.testing.assert_close(Posterior.open(tmp_path, model, vectorize=vectorize).predict(X.clone()), expected)


def test_averages_of_half_precision_models_are_probabilities(tmp_path: Path) -> None:
    model = model_of().to(torch.bfloat16)
    posterior = Posterior.open(stored(tmp_path, model=model), model)
    assert metrics.evaluate(posterior.predict(X.to(torch.bfloat16)), LABELS)["count"] == len(LABELS)


def test_batch_norm_weighs_batches_by_their_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    data = torch.cat((torch.randn(100, 1), torch.full((2, 1), 10.0)))
    posterior = Posterior.open(stored(tmp_path, model=model), model, batch_norm=[data[:100], data[100:]])
    posterior.predict(data)
    torch.testing.assert_close(posterior._statistics[posterior.members[0]]["0.running_mean"], data.mean(0))


def test_estimating_statistics_does_not_move_a_loader(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    loader = ql.Loader(TensorDataset(X, LABELS), batch_size=5, seed=0)
    next(iter(loader))
    Posterior.open(stored(tmp_path, model=model), model, batch_norm=loader).predict(X)
    assert loader.steps == 1


def test_the_log_likelihood_of_regression_has_the_noise_of_the_posterior(store: ql.SampleStore) -> None:
    posterior = Posterior.open(store, model_of(), link="identity", noise=0.25)
    y = torch.zeros(23, 3)
    expected = torch.distributions.Normal(posterior.samples(X).double(), 0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(diagnostics.log_likelihood(posterior, X, y)[0], expected)
