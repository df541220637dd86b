"""Batches in an order that is a pure function of (seed, stream, epoch), from a loader that counts them.

A resumed run gets exactly the batches that the interrupted one had not yet got.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._validate import check_integer, describe_differences
from ..quantization.random import Key

__all__ = ["Loader"]

ORDER, WORKERS = range(2)  # purposes of generators


class Loader(DataLoader[Any]):
    """A torch DataLoader that can be resumed in the middle of an epoch.

    Iterating yields the rest of the current epoch. A batch counts as done when the caller gets it, whatever workers have
    fetched ahead; after the last one the next epoch begins. After a loop was left, the next one resumes behind the last batch
    that the caller got. Only the newest iterator counts: an older one raises RuntimeError.

    The order neither depends on torch's global generator nor changes it, and does not depend on the number of workers. Random
    augmentation does: to be the same after a resume it must itself be a function of seed, epoch and index. If the dataset has a
    method ``set_epoch``, the loader calls it with its own epoch before each batch, even if several loaders share the dataset;
    workers get a copy of the dataset on which it was called when they were started.

    Args:
        dataset: has a length, and examples by index.
        batch_size: number of examples in a batch.
        shuffle: a new order in every epoch; otherwise the dataset's own.
        drop_last: leave out the last batch of an epoch if it is smaller.
        seed: of the order.
        stream: distinguishes chains that share a seed.
        rank, ranks: of processes that compute a step together. ``batch_size`` counts for all of them; each gets its part, and
            `share` is the weight of its mean loss.
        options: further ones of torch's DataLoader, such as ``num_workers`` and ``collate_fn``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        stream: int = 0,
        rank: int = 0,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        refused = [name for name in ("sampler", "batch_sampler", "generator") if options.get(name) is not None]
        refused += [] if options.get("in_order", True) else ["in_order=False"]
        if refused:
            raise TypeError(f"the order of a Loader follows from its seed; leave out {', '.join(refused)}")
        if options.get("persistent_workers") and hasattr(dataset, "set_epoch"):
            raise ValueError(
                "persistent workers keep a copy of the dataset, whose set_epoch would not be heard; leave out persistent_workers"
            )
        batch_size = check_integer("batch_size", batch_size, 1)
        self._rank, self._ranks = check_integer("rank", rank, 0), check_integer("ranks", ranks, 1)
        if self._rank >= self._ranks:
            raise ValueError(f"rank must be less than ranks, got rank {rank} of {ranks}")
        self._order = _Order(_length(dataset), batch_size, bool(shuffle), Key(seed, stream))
        self.share = 1.0
        self._newest = 0  # iterator
        options = {name: value for name, value in options.items() if name not in ("sampler", "batch_sampler")}
        self._options = dict(options)
        options["generator"] = self._order.generator(WORKERS)
        super().__init__(dataset, batch_size, sampler=self._order, drop_last=bool(drop_last), **options)
        if self._ranks > 1:  # torch refuses to set the attribute that batches come from
            self.__dict__["batch_sampler"] = _Parts(self.batch_sampler, self._rank, self._ranks)
        if len(self) == 0:
            raise ValueError(
                f"drop_last leaves no batch: batch_size is {batch_size}, the dataset has {self._order.num_data} examples"
            )

    @property
    def epoch(self) -> int:
        """Number of epochs done."""
        return self._order.epoch

    @property
    def position(self) -> int:
        """Number of batches of the current epoch done."""
        return self._order.position

    @property
    def steps(self) -> int:
        """Number of batches done in all."""
        return self.epoch * len(self) + self.position

    def _share(self, position: int) -> float:
        order = self._order
        examples = min(order.batch_size, order.num_data - position * order.batch_size)
        begin, end = _part(examples, self._rank, self._ranks)
        return (end - begin) * self._ranks / examples

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises one of its private iterators
        self._newest += 1
        self.generator = self._order.generator(WORKERS)  # the workers' seeds are drawn from it
        self._set_epoch(self.epoch)
        return _Rest(self, self._newest, super().__iter__())

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def until(self, steps: int) -> Iterator[Any]:
        """Yield batches until that many are done in all, over epochs: ``for x, y in loader.until(schedule.total_steps)``."""
        while self.steps < steps:
            for batch in self:
                yield batch
                if self.steps >= steps:
                    return

    def untouched(self) -> Loader:
        """Return another loader of the same data, at its beginning; iterating it does not move this one."""
        order = self._order
        return Loader(
            self.dataset,
            order.batch_size,
            shuffle=order.shuffle,
            drop_last=self.drop_last,
            seed=order.key.seed,
            stream=order.key.stream,
            rank=self._rank,
            ranks=self._ranks,
            **self._options,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader and what its order depends on, in JSON's types."""
        order = self._order
        return {
            "epoch": order.epoch, "position": order.position, "seed": order.key.seed, "stream": order.key.stream,
            "num_data": order.num_data, "batch_size": order.batch_size, "drop_last": self.drop_last, "shuffle": order.shuffle,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved loader. Raises ValueError for the state of one with another order."""
        here, state_dict = (
            self.state_dict(),
            {"stream": 0, **state_dict},
        )  # states saved before there were streams have none
        if missing := [name for name in here if name not in state_dict]:
            raise ValueError(f"this is not the state of a Loader: it has no {', '.join(missing)}")
        position_names = ("epoch", "position")
        there, mine = (
            {name: state[name] for name in here if name not in position_names} for state in (state_dict, here)
        )
        if wrong := describe_differences(there, mine):
            raise ValueError(f"the state is of a loader with another order: {', '.join(wrong)}")
        epoch, position = (check_integer(name, state_dict[name], 0) for name in position_names)
        if position >= len(self):
            raise ValueError(f"position must be less than {len(self)}, the batches of an epoch, got {position}")
        self._order.epoch, self._order.position = epoch, position
        self._newest += 1


class _Order:
    """The indices of the rest of the current epoch."""

    def __init__(self, num_data: int, batch_size: int, shuffle: bool, key: Key) -> None:
        self.num_data, self.batch_size, self.shuffle, self.key = num_data, batch_size, shuffle, key
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return self.num_data

    def __iter__(self) -> Iterator[int]:
        begin = self.position * self.batch_size
        if not self.shuffle:
            return iter(range(begin, self.num_data))
        order = torch.randperm(self.num_data, generator=self.generator(ORDER), device="cpu")
        return iter(order[begin:].tolist())

    def generator(self, purpose: int) -> torch.Generator:
        low, high = self.key.fold(self.epoch).fold(purpose).bits
        device = torch.get_default_device() if purpose == WORKERS else "cpu"  # where torch draws the workers' seeds
        return torch.Generator(device).manual_seed(low | high << 32)


class _Parts:
    """The part of each batch that one rank computes."""

    def __init__(self, batches: Any, rank: int, ranks: int) -> None:
        self.batches, self.rank, self.ranks = batches, rank, ranks

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            begin, end = _part(len(batch), self.rank, self.ranks)
            yield batch[begin:end] or batch[:1]  # all ranks must compute something; this one's share is then 0


def _part(examples: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return begin and end of a rank's part of a batch: parts differ by one example at most, later ones are smaller."""
    return -(-rank * examples // ranks), -(-(rank + 1) * examples // ranks)


class _Rest:
    """An iterator over the rest of an epoch that counts batches."""

    def __init__(self, loader: Loader, number: int, batches: Iterator[Any]) -> None:
        self.loader, self.number, self.batches, self.epoch = loader, number, batches, loader.epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader, order = self.loader, self.loader._order
        if self.number != loader._newest:
            raise RuntimeError("this iterator has been overtaken: the loader was iterated anew, loaded or failed since")
        try:
            if loader.num_workers == 0:
                loader._set_epoch(self.epoch)  # another loader of the same dataset may have set its own
            batch = next(self.batches)
        except StopIteration:
            raise
        except BaseException:
            loader._newest += 1  # torch would continue behind the batch that failed; a new iterator begins with it
            raise
        loader.share = loader._share(order.position)
        epochs, order.position = divmod(order.position + 1, len(loader))
        order.epoch += epochs
        return batch


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"a Loader needs a dataset with a length and examples by index; {type(dataset).__name__} has no order to remember"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty; a Loader needs at least one example")
    return len(dataset)
