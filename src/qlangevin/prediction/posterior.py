"""Bayesian model averaging over stored samples: p(y | x) = 1/S Σ p(y | x, θ_s).

The model is evaluated with the weights of each sample (`ensemble`) and left as it was; `predictive` averages the outputs.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .._progress import progress_bar
from .._validate import check_choice, check_integer
from ..storage import model_tensors
from ..storage.sample import Sample
from .batches import check_batch, group_batches, list_tensors, move_batch, without_moving
from .calling import Forward, check_forward
from .ensemble import Ensemble, exclusively
from .export import check_picklable, write_tensors
from .not_finite import report_not_finite
from .predictive import Average, Link, Uncertainty, apply_link
from .shared_noise import warn_of_shared_noise
from .sources import Source, list_chains
from .weights import Weights, model_device

__all__ = ["Posterior"]

GROUP_SIZE = 512  # examples of a loader for which each sample is decoded once


class Posterior:
    """The average of the predictions of a model over many samples. Made by `open`.

    ``posterior[10::2]`` is the posterior over some of the samples of every chain. A posterior can be sent to other processes:
    it takes the model and the paths of its stores along, and maps the samples there when they are used.
    """

    def __init__(
        self,
        weights: Weights,
        chains: Sequence[Sequence[Sample]],
        link: Link,
        noise: float,
        vectorize: bool | None,
        class_dim: int | None = None,
        given: set[str] | None = None,
    ) -> None:
        self._weights, self.model = weights, weights.model
        self._chains = [list(samples) for samples in chains]
        self.members = [sample for samples in self._chains for sample in samples]  # chain after chain
        self.link, self.noise, self.class_dim, self._vectorize = link, noise, class_dim, vectorize
        self._given = set[str]() if given is None else given  # warnings; slices and chains share it
        self._ensemble = self._make_ensemble()

    def _make_ensemble(self) -> Ensemble:
        return Ensemble(self.model, len(self), self._decode_sample, self._vectorize, self._weights.forward)

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
        forward: Forward | None = None,
    ) -> Posterior:
        """Open a posterior over the samples that are there now.

        Args:
            stores: a store, its folder or some of its samples (``store[10::2]``); or several of these, one for each chain. A
                folder with ``chain-0/``, ``chain-1/`` and so on holds as many chains.
            model: the model that was sampled, on the device to compute on; its own weights are neither used nor changed, but
                for a base that the store only refers to (``frozen="reference"``), which is compared with its checksum. Its
                names may have one prefix more or less than those stored, such as ``module.`` or ``base_model.model.``.
            link: turns outputs into predictions: ``"softmax"`` (classification), ``"sigmoid"`` (binary, multilabel) or
                ``"identity"`` (regression).
            noise: for regression, the variance of the data around the mean.
            batch_norm: ``"stored"`` uses the statistics stored with each sample; with a loader, they are estimated from its
                data for each sample.
            vectorize: evaluate many samples at once; None decides by the size of the model and of the inputs.
            class_dim: the dim of the outputs that has the classes: 1 if they are (example, class, ...), -1 if they are
                (example, ..., class). None is dim 1 of outputs (example, class); outputs of more dims are then refused.
            forward: calls the model for a batch and returns its outputs: ``lambda model, batch: model(**batch).logits``. None
                calls it with the batch: a tensor, a tuple of arguments, or a dict of named ones without its labels.
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
        check_forward(forward)
        chains, loader = list_chains(stores), None if isinstance(batch_norm, str) else batch_norm
        weights = Weights(model_tensors.unwrap(model), chains, loader, forward)
        warn_of_shared_noise(chains, stacklevel=2)
        return cls(weights, chains, link, noise, vectorize, class_dim)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: the model, paths of stores, and settings; tensors of samples stay in their files."""
        check_picklable(self._weights.forward)
        return {name: value for name, value in self.__dict__.items() if name != "_ensemble"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ensemble = self._make_ensemble()

    @property
    def batch_norm(self) -> Iterable[Any] | None:
        """The loader from which statistics of batch normalization are estimated; None if those stored are used."""
        return self._weights.batch_norm

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
        about = (self.link, self.noise, self._vectorize, self.class_dim)
        return Posterior(self._weights, chains, *about, self._given)

    # ---- predictions

    def predict(self, x: Any) -> Tensor:
        """Return the average prediction for a batch: probabilities, or means of regression.

        ``x`` is the input of the model: a tensor, a tuple of arguments, or a dict of named ones, whose ``labels`` are left out;
        or whatever ``forward`` takes. A sample that predicts numbers that are not finite raises FloatingPointError, which names
        it; if the inputs are not finite, that is a warning.
        """
        check_batch(x, "predict")
        return self._average([x], spread=False)[0].mean

    def uncertainty(self, x: Any) -> Uncertainty:
        """Return the average with its total, aleatoric and epistemic uncertainty, defined in `Uncertainty`."""
        check_batch(x, "uncertainty")
        return self._average([x], spread=True)[0].uncertainty()

    def samples(self, x: Any) -> Tensor:
        """Return the prediction of each sample, (sample, example, ...)."""
        check_batch(x, "samples")
        x = move_batch(x, self.device)
        found = torch.cat([*self._predictions(x)])
        self._check_finite(found, x, [found])
        return found

    def predict_loader(self, loader: Iterable[Any], progress: bool = True) -> Iterator[Any]:
        """Yield the average prediction for each batch of a loader; `qlangevin.metrics.evaluate` takes them.

        A batch is inputs and labels, which yields (prediction, labels): ``(x, y)``, ``(x1, x2, ..., y)``, or a dict with
        ``labels``; or inputs alone, which yields predictions: a tensor, ``(x,)``, or a dict without. ``forward`` gets the inputs,
        of a dict all of it. Small batches are taken several at a time, so that a sample is decoded once for all of them.
        ``progress`` shows a bar on standard error if that is a terminal.
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
            for several in group_batches(without_moving(loader), GROUP_SIZE):
                averages = self._average([x for x, _ in several], spread, advance)
                yield from zip(averages, (labels for _, labels in several), strict=True)

    def _average(self, inputs: list[Any], spread: bool, advance: Any = lambda label, steps: None) -> list[Average]:
        averages = [Average(self.link, self.noise, spread, self.class_dim) for _ in inputs]
        inputs = [move_batch(x, self.device) for x in inputs]
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
        return model_device(self.model)

    def _decode_sample(self, s: int) -> dict[str, Tensor]:
        """Return the weights and buffers of a sample on the device of the model."""
        return self._weights.decode(self.members[s])

    def export(self, i: int, path: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        """Return the `state_dict` of the model with the weights of the i-th sample: plain floats under the model's own names.

        Samples are counted chain after chain. With a ``path`` it is also written there, as a safetensors file that
        ``from_pretrained`` of transformers reads as ``model.safetensors`` beside a ``config.json``; tied weights once.
        """
        count = len(self)
        i = check_integer("i", i, -count, count - 1)
        with exclusively(self.model):
            found = self._weights.export(self.members[i])
        if path is not None:
            write_tensors(Path(path), {name: found[name] for name in model_tensors.named_tensors(self.model)})
        return found


def _check_class_dim(class_dim: Any, link: Link) -> None:
    is_dim = isinstance(class_dim, numbers.Integral) and not isinstance(class_dim, bool) and class_dim != 0
    if class_dim is not None and not (is_dim and link == "softmax"):
        raise ValueError(
            f"class_dim must be a dim of the outputs other than 0, which has the examples, and goes with link='softmax', got "
            f"{class_dim!r} with link={link!r}"
        )
