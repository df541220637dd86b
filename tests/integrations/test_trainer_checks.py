"""Checks of a trainer's settings that need no trainer."""

import warnings

import pytest

import qlangevin as ql
from qlangevin.integrations.trainer_checks import check_num_data

COUNT = "sum((b['labels'][:, 1:] != -100).sum().item() for b in trainer.get_train_dataloader())"


def test_what_the_first_batch_says_of_n_is_no_fact() -> None:
    with pytest.warns(ql.QLangevinWarning) as caught:
        check_num_data([60.0], 60, 5.25, COUNT)
    assert str(caught[0].message) == (
        "num_data=60, but the loss is a mean over 60 examples of about 5.25 labels (tokens) each: the posterior is that of about "
        f"0.19 times the data. N is about 315, going by the first batch; count it: {COUNT}"
    )


def test_examples_with_one_label_are_counted() -> None:
    with pytest.warns(
        ql.QLangevinWarning, match="mean over 60 examples: .* of 0.1 times .*; num_data=60 counts each once"
    ):
        check_num_data([6.0], 60, 1.0, COUNT)


def test_about_the_right_number_passes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_num_data([274.0], 60, 5.25, COUNT)
