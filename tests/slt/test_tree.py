"""Draws in devinterp's schema; its own analyses run on them where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import qlangevin as ql

WORDS, LENGTH = 11, 7
pytestmark = pytest.mark.filterwarnings("ignore")


class Words(nn.Module):
    """Logits of the next word, from the word before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.score(self.embed(ids).tanh())  # type: ignore[no-any-return]


def sentences(count: int, seed: int) -> DataLoader[Any]:
    ids = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return DataLoader([{"input_ids": row} for row in ids], batch_size=8)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> ql.slt.LLC:
    torch.manual_seed(0)
    observables = {"some words": sentences(6, 1), "train": sentences(5, 2)}
    masks = {"full": "*", "score": "score.*"}
    return ql.slt.llc(
        Words(), sentences(64, 0), lr=1e-3, localization=10.0, nbeta=20.0, chains=2, draws=10, burn_in=6,
        steps_between=2, observables=observables, masks=masks,
    )  # fmt: skip


def test_names_and_dimensions(found: ql.slt.LLC) -> None:
    data = found.to_xarray().dataset
    assert {name: array.dims for name, array in data.data_vars.items()} == {
        "init_loss": ("chain", "token_pos"),
        "sampling_loss": ("chain", "draw", "batch", "token_pos"),
        "sampling_loss_micro": ("chain", "step", "batch_sampling", "token_pos"),
        "loss_some_words": ("chain", "draw", "batch_some_words", "token_pos"),
        "input_ids_some_words": ("batch_some_words", "token"),
        "loss_train": ("chain", "draw", "batch_train", "token_pos"),
        "input_ids_train": ("batch_train", "token"),
    }
    assert data.sizes["token_pos"] == LENGTH - 1
    assert data.sizes["step"] == 20
    assert data.sizes["draw"] == 10
    config = data.attrs["metadata"]["config"]
    assert config["sampler"]["n_beta"] == 20.0
    assert config["tokenizer_context_length"] == LENGTH
    ids = torch.randint(WORDS, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    assert np.array_equal(data["input_ids_some_words"], ids)


def test_their_schema_has_ours() -> None:
    theirs = pytest.importorskip("devinterp.slt.sampling")
    datasets = pytest.importorskip("datasets")
    ids = [batch["input_ids"] for batch in sentences(32, 0)]
    data = datasets.Dataset.from_dict({"input_ids": torch.cat(ids).tolist()}).with_format("torch")
    tree = theirs.sample(
        Words(), data, {"train": data}, lr=1e-3, n_beta=20.0, num_chains=2, num_draws=4, batch_size=4, device="cpu",
        batches_per_draw=1, num_init_loss_batches=2,
    )  # fmt: skip
    mine = ql.slt.llc(
        Words(), sentences(64, 0), lr=1e-3, localization=10.0, chains=2, draws=4, observables={"train": sentences(4, 0)}
    ).to_xarray()
    for name, array in mine.dataset.data_vars.items():
        assert array.dims == tree.dataset[name].dims, name
        assert array.dtype == tree.dataset[name].dtype, name
    keys = tree.dataset.attrs["metadata"]["config"]["sampler"].keys()
    missing = keys - mine.dataset.attrs["metadata"]["config"]["sampler"].keys()
    assert missing <= {"num_init_loss_batches"}


def test_their_analyses_run(found: ql.slt.LLC) -> None:
    llc, bif = pytest.importorskip("devinterp.slt.llc"), pytest.importorskip("devinterp.slt.bif")
    susceptibilities = pytest.importorskip("devinterp.slt.susceptibilities")
    theirs = llc.compute_llc(found.to_xarray())
    assert float(theirs.llc_mean) == pytest.approx(found.mean, rel=1e-4)
    assert theirs.llc_per_chain.values == pytest.approx(found.per_chain, rel=1e-4, abs=1e-4)
    influences = bif.compute_bif(found.to_xarray(), correlation_method="sequence").influences.values
    losses = np.concatenate([found.observables[name].mean(3) for name in ("some words", "train")], axis=2)
    assert influences == pytest.approx(np.corrcoef(losses.reshape(20, 11).T), abs=1e-4)
    tree = susceptibilities.compute_susceptibilities({n: p.to_xarray() for n, p in found.parts.items()}, "train")
    assert np.isfinite(tree["susceptibilities"]["sus"].values).all()


def test_observables_must_fit_into_one_tree(found: ql.slt.LLC) -> None:
    observables: Any = {
        "words": sentences(4, 1),
        "x": (sentences(4, 1), lambda m, b: ql.slt.token_losses(m, b).mean(1)),
    }
    other = ql.slt.llc(
        Words(), sentences(64, 0), lr=1e-3, localization=10.0, chains=1, draws=4, observables=observables
    )
    with pytest.raises(ValueError, match="must have equally many tokens"):
        other.to_xarray()


def test_padding_is_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)}
    with pytest.raises(ValueError, match="the batch has padding"):
        ql.slt.token_losses(Words(), batch)
