"""Bayesian model averaging over stored samples: p(y | x) = 1/S Σ p(y | x, θ_s).

The model is evaluated with the weights of each sample (`ensemble`) and left as it was; `predictive` averages the outputs.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from .._progress import progress_bar
from .._validate import check_choice
from ..sampling.loader import Loader
from ..storage import model_tensors
from ..storage.sample import Sample, Samples, chain_folders
from ..storage.store import SampleStore
from .ensemble import Ensemble, estimate_batch_norm, list_tensors, split_inputs
from .not_finite import report_not_finite
from .predictive import Average, Link, Uncertainty, apply_link

__all__ = ["Posterior"]

Source: TypeAlias = str | os.PathLike[str] | Samples | Sample | Sequence[Sample]

GROUP_SIZE = 512  # examples of a loader for which each sample is decoded once


class Posterior:
    """The average of the predictions of a model over many samples. Made by `open`.

    ``posterior[10::2]`` is the posterior over some of the samples of every chain.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: Sequence[Sequence[Sample]],
        link: Link,
        noise: float,
        batch_norm: Iterable[Any] | None,
        vectorize: bool | None,
        class_dim: int | None = None,
        statistics: dict[Sample, dict[str, Tensor]] | None = None,
        given: set[str] | None = None,
    ) -> None:
        self.model, self._chains = model_tensors.unwrap(model), [list(samples) for samples in chains]
        self.members = [sample for samples in self._chains for sample in samples]  # chain after chain
        self.link, self.noise, self.batch_norm, self.class_dim = link, noise, batch_norm, class_dim
        self._vectorize = vectorize
        self._statistics = {} if statistics is None else statistics  # of batch normalization, estimated for each sample
        self._given = set[str]() if given is None else given  # warnings; slices and chains share it
        self._ensemble = Ensemble(self.model, len(self), self._decode_sample, vectorize)

    @classmethod
    def open(
        cls,
        stores: Source | Iterable[Source],
        model: nn.Module,
        *,
        link: Link = "softmax",
        noise: float = 0.0,
        batch_norm: Literal["stored"] | Iterable[Any] = "stored",
        vectorize: bool | None = None,
        class_dim: int | None = None,
    ) -> Posterior:
        """Open a posterior over the samples that are there now.

        Args:
            stores: a store, its folder or some of its samples (``store[10::2]``); or several of these, one for each chain. A
                folder with ``chain-0/``, ``chain-1/`` and so on holds as many chains.
            model: the model that was sampled, on the device to compute on; its own weights are neither used nor changed.
            link: turns outputs into predictions: ``"softmax"`` (classification), ``"sigmoid"`` (binary, multilabel) or
                ``"identity"`` (regression).
            noise: for regression, the variance of the data around the mean.
            batch_norm: ``"stored"`` uses the statistics stored with each sample; with a loader, they are estimated from its
                data for each sample.
            vectorize: evaluate many samples at once; None decides by the size of the model and of the inputs.
            class_dim: the dim of the outputs that has the classes: 1 if they are (example, class, ...), -1 if they are
                (example, ..., class). None is dim 1 of outputs (example, class); outputs of more dims are then refused.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a module, got {type(model).__name__}: Posterior.open(stores, model)")
        check_choice("link", link, ("softmax", "sigmoid", "identity"))
        if not isinstance(noise, numbers.Real) or not 0 <= noise < math.inf or (noise and link != "identity"):
            raise ValueError(
                f"noise must be a variance, and goes with link='identity', got {noise!r} with link={link!r}"
            )
        _check_class_dim(class_dim, link)
        if batch_norm != "stored" and (isinstance(batch_norm, str) or not isinstance(batch_norm, Iterable)):
            raise ValueError(f"batch_norm must be 'stored' or a loader, got {batch_norm!r}")
        chains = [_list_samples(source) for source in _list_sources(stores)]
        if not chains:
            raise ValueError("a posterior needs samples, but no store was given")
        found = model_tensors.describe(model_tensors.named_tensors(model))
        for store in {sample.store for samples in chains for sample in samples}:
            model_tensors.check_fits(found, store.manifest.tensors, f"the store in {store.path}")
        loader = None if isinstance(batch_norm, str) else batch_norm
        return cls(model, chains, link, noise, loader, vectorize, class_dim)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        chains = f"{len(self._chains)} chains" if len(self._chains) > 1 else "one chain"
        return f"Posterior({type(self.model).__name__}, {len(self)} samples of {chains}, {self.link})"

    def __getitem__(self, some: slice) -> Posterior:
        if not isinstance(some, slice):
            raise TypeError(f"a posterior is cut by slices, such as posterior[10:], got {some!r}")
        return self._select([samples[some] for samples in self._chains])

    @property
    def chains(self) -> list[Posterior]:
        """A posterior for each chain."""
        return [self._select([samples]) for samples in self._chains]

    def _select(self, chains: Sequence[Sequence[Sample]]) -> Posterior:
        if not all(chains):
            raise ValueError(
                f"no sample would be left of a chain; there are {', '.join(map(str, map(len, self._chains)))}"
            )
        about = (self.link, self.noise, self.batch_norm, self._vectorize, self.class_dim)
        return Posterior(self.model, chains, *about, self._statistics, self._given)

    # ---- predictions

    def predict(self, x: Any) -> Tensor:
        """Return the average prediction for a batch: probabilities, or means of regression.

        ``x`` is the input of the model: a tensor, a tuple of arguments, or a dict of named ones. A sample that predicts numbers
        that are not finite raises FloatingPointError, which names it; if the inputs are not finite, that is a warning.
        """
        return self._average([x], spread=False)[0].mean

    def uncertainty(self, x: Any) -> Uncertainty:
        """Return the average with its total, aleatoric and epistemic uncertainty, defined in `Uncertainty`."""
        return self._average([x], spread=True)[0].uncertainty()

    def samples(self, x: Any) -> Tensor:
        """Return the prediction of each sample, (sample, example, ...)."""
        x = self._move_inputs(x)
        found = torch.cat([*self._predictions(x)])
        self._check_finite(found, x, [found])
        return found

    def predict_loader(self, loader: Iterable[Any], progress: bool = True) -> Iterator[Any]:
        """Yield the average prediction for each batch of a loader; `qlangevin.metrics.evaluate` takes them.

        A batch is inputs and labels, which yields (prediction, labels), or inputs alone, which yields predictions. Small
        batches are taken several at a time, so that a sample is decoded once for all of them. ``progress`` shows a bar on
        standard error if that is a terminal.
        """
        for average, labels in self._average_loader(loader, progress, spread=False):
            yield average.mean if labels is None else (average.mean, labels)

    def uncertainty_loader(self, loader: Iterable[Any], progress: bool = True) -> Iterator[Any]:
        """Yield the `uncertainty` for each batch of a loader, like `predict_loader`; `qlangevin.metrics.ood` takes them."""
        for average, labels in self._average_loader(loader, progress, spread=True):
            yield average.uncertainty() if labels is None else (average.uncertainty(), labels)

    def _average_loader(self, loader: Iterable[Any], progress: bool, spread: bool) -> Iterator[tuple[Average, Any]]:
        try:
            total = len(cast(Sized, loader)) * len(self)
        except TypeError:  # it has no length, or has one and does not know it
            total = None
        with progress_bar(total, f"averaging {len(self)} samples", progress) as advance:
            for several in _group_batches(_without_moving(loader)):
                averages = self._average([x for x, _ in several], spread, advance)
                yield from zip(averages, (labels for _, labels in several), strict=True)

    def _average(self, inputs: list[Any], spread: bool, advance: Any = lambda label, steps: None) -> list[Average]:
        averages = [Average(self.link, self.noise, spread, self.class_dim) for _ in inputs]
        inputs = [self._move_inputs(x) for x in inputs]
        for i, y in self._ensemble.outputs(inputs):
            averages[i].add(apply_link(y, self.link, self.class_dim))
            advance(f"averaging {len(self)} samples", len(y))
        for x, average in zip(inputs, averages, strict=True):
            self._check_finite(average.mean, x, self._predictions(x))
        return averages

    def _predictions(self, x: Any) -> Iterator[Tensor]:
        """Yield the predictions of some samples at a time."""
        for _, y in self._ensemble.outputs([x]):
            yield apply_link(y, self.link, self.class_dim)

    def _check_finite(self, found: Tensor, x: Any, predictions: Iterable[Tensor]) -> None:
        """Find out who is to blame if what was found is not finite, for which each sample may be evaluated again."""
        if not bool(found.isfinite().all()):
            with torch.no_grad():
                report_not_finite(predictions, self.members, list_tensors(x), self._given)

    # ---- weights

    @property
    def device(self) -> torch.device:
        return next((t.device for t in chain(self.model.parameters(), self.model.buffers())), torch.device("cpu"))

    def _move_inputs(self, x: Any) -> Any:
        def move(t: Any) -> Any:
            return t.to(self.device) if isinstance(t, Tensor) else t

        args, kwargs = split_inputs(x)
        if kwargs:
            return {name: move(t) for name, t in kwargs.items()}
        return tuple(map(move, args)) if isinstance(x, (list, tuple)) else move(x)

    def _decode_sample(self, s: int) -> dict[str, Tensor]:
        """Return the weights and buffers of a sample on the device of the model."""
        sample = self.members[s]
        tensors = sample.decode(self.device)
        if self.batch_norm is None:
            return tensors
        if sample not in self._statistics:
            batches = (self._move_inputs(split_batch(batch)[0]) for batch in _without_moving(self.batch_norm))
            self._statistics[sample] = estimate_batch_norm(self.model, tensors, batches)
        return tensors | self._statistics[sample]


def _list_sources(stores: Source | Iterable[Source]) -> list[Source]:
    """Return the source of each chain; a folder may hold several."""
    if isinstance(stores, (str, os.PathLike)):
        return [*chain_folders(stores)]
    if isinstance(stores, Samples):
        return [stores]
    if isinstance(stores, Sample):
        return [[stores]]
    if not isinstance(stores, Iterable):
        raise TypeError(f"stores must be stores, their folders or lists of samples, got {stores!r}")
    several = list(stores)
    if several and isinstance(several[0], Sample):
        return [cast(Sequence[Sample], several)]
    return [
        chain for one in several for chain in (chain_folders(one) if isinstance(one, (str, os.PathLike)) else [one])
    ]


def _check_class_dim(class_dim: Any, link: Link) -> None:
    is_dim = isinstance(class_dim, numbers.Integral) and not isinstance(class_dim, bool) and class_dim != 0
    if class_dim is not None and not (is_dim and link == "softmax"):
        raise ValueError(
            f"class_dim must be a dim of the outputs other than 0, which has the examples, and goes with link='softmax', got "
            f"{class_dim!r} with link={link!r}"
        )


def _list_samples(source: Source) -> list[Sample]:
    store = SampleStore.open(source) if isinstance(source, (str, os.PathLike)) else cast(Sequence[Sample], source)
    if not len(store):
        raise ValueError(f"a posterior needs samples, but there are none yet in {getattr(store, 'path', store)}")
    return list(store)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch, None if it has no labels."""
    if not isinstance(batch, (list, tuple)):
        return batch, None
    if len(batch) not in (1, 2):
        raise ValueError(
            f"a batch must be inputs, or inputs and labels, got {len(batch)} things; several inputs go into a tuple or dict"
        )
    return batch[0], batch[1] if len(batch) == 2 else None


def _without_moving(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the batches of a loader; the position of a `Loader`, which belongs to training, does not change."""
    return loader.untouched() if isinstance(loader, Loader) else loader


def _group_batches(loader: Iterable[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield batches, several at a time if they are small."""
    several: list[tuple[Any, Any]] = []
    examples = 0
    for batch in loader:
        several.append(split_batch(batch))
        first = next(iter(list_tensors(several[-1][0])), None)
        examples += first.shape[0] if first is not None and first.dim() else 1
        if examples >= GROUP_SIZE:
            yield several
            several, examples = [], 0
    if several:
        yield several
