"""The weights of each sample under the names of a model and on its device, for evaluation and for export.

Frozen parameters are decoded once for all samples. Those that a store only refers to are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..quantization.qtensor import QTensor
from ..storage.model_tensors import move_to, named_tensors, to_plain
from ..storage.sample import Sample, Samples
from .batches import move_batch, split_batch, without_moving
from .calling import Forward
from .ensemble import estimate_batch_norm

__all__ = ["Weights", "model_device"]


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first tensor."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _name_tensors(model: nn.Module, chains: Sequence[Sequence[Sample]]) -> dict[Samples, dict[str, str]]:
    """Return, for each store, the model's names of its tensors."""
    found = dict[Samples, dict[str, str]]()
    own = {id(t): name for name, t in named_tensors(model).items()}
    for store in dict.fromkeys(sample.store for samples in chains for sample in samples):
        found[store] = {name: own[id(t)] for name, t in store.fit(model, f"the store in {store.path}").items()}
    return found


class Weights:
    """The weights of samples, for one model.

    Args:
        model: the model, whose tensors have the names of the stores but for a prefix.
        chains: the samples; raise ValueError if one of their stores is of another model, or refers to another base.
        batch_norm: a loader, if the statistics of batch normalization are to be estimated for each sample.
        forward: how to call the model.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: Sequence[Sequence[Sample]],
        batch_norm: Iterable[Any] | None,
        forward: Forward | None,
    ) -> None:
        self.model, self.batch_norm, self.forward = model, batch_norm, forward
        self.names = _name_tensors(model, chains)  # the model's name of each tensor of each store
        self.statistics: dict[Sample, dict[str, Tensor]] = {}  # of batch normalization, estimated for each sample
        self._frozen: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # by checksum and device: chains share them

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": {}}

    def decode(self, sample: Sample) -> dict[str, Tensor]:
        """Return the tensors of a sample by the names of the model; a base that the store refers to is the model's own."""
        device, names = model_device(self.model), self.names[sample.store]
        infos = sample.store.manifest.tensors
        sampled = [name for name, info in infos.items() if info.kind in ("parameter", "buffer")]
        tensors = {names[name]: to_plain(move_to(sample[name], device)) for name in sampled}
        tensors |= self._decode_frozen(sample, device)
        if refers := sample.store.manifest.select("reference"):
            own = named_tensors(self.model)
            tensors |= {names[name]: own[names[name]] for name in refers}
        if self.batch_norm is None:
            return tensors
        if sample not in self.statistics:
            self.statistics[sample] = estimate_batch_norm(self.model, tensors, self._batches(device), self.forward)
        return tensors | self.statistics[sample]

    def _batches(self, device: torch.device) -> Iterator[Any]:
        for batch in without_moving(self.batch_norm or ()):
            yield move_batch(split_batch(batch)[0], device)

    def _decode_frozen(self, sample: Sample, device: torch.device) -> dict[str, Tensor]:
        """Return frozen parameters, the same objects for all samples; a packed model gets codes, and decodes them itself."""
        record, names = sample.store.manifest.frozen, self.names[sample.store]
        if record is None:
            return {}
        key = (record.digest, device, *names.values())
        if key not in self._frozen:
            own, found = named_tensors(self.model), dict[str, Tensor]()
            for name in sample.store.manifest.select("frozen"):
                t = move_to(sample[name], device)
                found[names[name]] = t if isinstance(own[names[name]], QTensor) else to_plain(t)
            self._frozen[key] = found
        return self._frozen[key]

    def export(self, sample: Sample) -> dict[str, Tensor]:
        """Return a `state_dict` of the model with the tensors of a sample: plain floats, tied weights under all their names."""
        tensors, every = self.decode(sample), self.model.state_dict(keep_vars=True)
        first = {id(t): name for name, t in named_tensors(self.model).items()}
        return {name: to_plain(tensors.get(first.get(id(t), name), t)).clone() for name, t in every.items()}
