"""The experiments' settings: the paper's numbers, what is refused, and the ways a configuration is written down."""

import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Linear

from qlangevin import SGLD
from qlangevin.cli.main import main
from qlangevin.experiments import run
from qlangevin.experiments.data import load_dataset
from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.presets import EXPERIMENTS, Cifar10, Digits, Experiment, ImageNet, Imdb, from_json
from qlangevin.sampling.schedules import ConstantLR, LinearDecayLR, StepDecayLR

# Appendix "Experimental Details": epochs, batch, learning rate, weight decay, samples; cycles, samples of each.
PAPER = {
    "mnist-logistic": ((20, 64, 0.1, 6 / 60_000), None),
    "mnist-mlp": ((20, 64, 0.1, 6 / 60_000), None),
    "cifar10": ((245, 128, 0.5, 5e-4, 50), (7, 5)),
    "cifar100": ((245, 128, 0.5, 5e-4, 50), (7, 5)),
    "imdb": ((50, 80, 0.3, 5e-4, 20), (1, 20)),
    "imagenet": ((90, 256, 0.2, 1e-4, 20), None),
}


def schedule(config: Experiment, per_epoch: int) -> Any:
    sampler = SGLD(Linear(1, 1).parameters(), lr=config.first_lr, num_data=1)
    return config.schedule(sampler, config.length_in_epochs * per_epoch)


@pytest.mark.parametrize("name", PAPER)
def test_settings_are_those_of_the_paper(name: str) -> None:
    config, (numbers, cycles) = EXPERIMENTS[name](), PAPER[name]
    here = (config.epochs, config.batch, config.lr, config.weight_decay, config.samples)
    assert here[: len(numbers)] == numbers
    assert cycles is None or (config.cycles, config.cycle_samples) == cycles
    assert config.temperature == (1.0 if name.startswith("mnist") else 1e-3)
    assert config.scaled == []


def test_networks_are_those_of_the_paper() -> None:
    data = load_dataset("digits")
    for name, layers in (("mnist-logistic", [(64, 10)]), ("mnist-mlp", [(64, 100), (100, 10)])):
        model = EXPERIMENTS[name]().model(data)
        assert [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, Linear)] == layers
    resnet = Cifar10().model(data)
    assert sum(p.numel() for p in resnet.parameters()) == 11_173_962  # of ResNet-18 for CIFAR-10
    lstm: Any = Imdb().model(replace(data, words=1000, classes=2)).get_submodule("lstm")
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers) == (100, 256, 2)


def test_schedules_are_those_of_the_paper() -> None:
    assert isinstance(schedule(EXPERIMENTS["mnist-mlp"](), 10), ConstantLR)
    cifar = schedule(Cifar10(), 3)
    assert isinstance(cifar, LinearDecayLR)
    assert cifar.moments == tuple(3 * epoch for epoch in range(196, 246))  # once an epoch, the last 50
    cyclical = schedule(Cifar10(method="vc-csgldlp-l"), 2)
    assert cyclical.moments == tuple(
        2 * epoch for cycle in range(7) for epoch in range(35 * cycle + 31, 35 * cycle + 36)
    )
    assert schedule(Imdb(), 1).moments == tuple(range(31, 51))
    assert schedule(Imdb(method="csgldfp"), 1).moments == tuple(range(31, 51))
    assert schedule(Cifar10(method="sgdfp"), 1).moments == (245,)


def test_imagenet_is_sgd_and_then_sgld_at_the_rate_it_ends_with() -> None:
    config = ImageNet(method="sgldlp-f")
    first = config.warm_start
    assert first == ImageNet(method="sgdlp-f")
    assert first.warm_start is None
    sgd, sgld = schedule(first, 1), schedule(config, 2)
    assert isinstance(sgd, StepDecayLR)
    assert [sgd.factor(epoch) for epoch in (0, 29, 30, 59, 60, 89)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert config.first_lr == pytest.approx(first.first_lr * sgd.factor(89))
    assert isinstance(sgld, ConstantLR)
    assert sgld.moments == tuple(range(1, 21))  # 10 epochs
    assert ImageNet(method="sgldfp").warm_start == ImageNet(method="sgdfp")


# ---- writing down


def configs() -> st.SearchStrategy[Experiment]:
    """Any experiment with any settings that are allowed."""
    formats = st.sampled_from(["fixed8.6", "fixed4.2", "bfp8", "bfp8/tensor", "bfp8/32", "e4m3", "bf16", None])
    shares, amounts = st.floats(0, 1), st.floats(0, 1e300)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "method": st.sampled_from(get_args(MethodName)),
        "activations": st.sampled_from(["auto", "same", "full", "bfp16", "bfp8/32"]),
        "seed": st.integers(0, 2**64 - 1),
        "workers": st.integers(0, 9),
        "wire": st.sampled_from([None, "fp32", "bfp8/64", "bfp16/32"]),
        **dict.fromkeys(("burn_in", "exploration"), shares),
        **dict.fromkeys(("lr", "weight_decay", "temperature"), amounts),
        **dict.fromkeys(("limit_train", "limit_test"), st.none() | st.integers(1, 10**9)),
    }

    @st.composite
    def draw(drawn: st.DrawFn) -> Experiment:
        preset = drawn(st.sampled_from(list(EXPERIMENTS.values())))
        names = drawn(st.sets(st.sampled_from([f.name for f in fields(preset) if f.name != "format"])))
        given = {name: drawn(kinds.get(name, st.integers(1, 10**6))) for name in sorted(names)}
        low = METHODS[given.get("method", "vc-sgldlp-l")].low_precision
        given |= {} if low or "wire" not in given else {"wire": "fp32"}
        return preset(**given, format=drawn(formats) if low else None)

    return draw()


@given(configs())
def test_a_configuration_is_read_as_it_was_written(config: Experiment) -> None:
    assert from_json(json.loads(json.dumps(config.to_json()))) == config


class Asked(Exception):
    """Raised in place of a run, with its configuration and folder."""


def ask(config: Experiment, folder: Path, *_: object) -> None:
    raise Asked(config, folder)


@settings(max_examples=40)
@given(configs())
def test_the_command_of_a_result_gives_the_run_again(config: Experiment) -> None:
    program, *arguments = shlex.split(config.command)
    assert program == "qlangevin"
    with patch.object(run, "run_experiment", ask), pytest.raises(Asked) as asked:
        main(arguments)
    again, folder = asked.value.args
    assert replace(again, workers=config.workers) == config
    assert folder == Path("results", config.name, config.run_name)


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5) | st.just("bfp8"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@given(configs(), st.data(), values)
def test_a_configuration_with_any_other_value_is_valid_or_refused_in_a_sentence(
    config: Experiment, data: st.DataObject, value: object
) -> None:
    saved = config.to_json()
    saved[data.draw(st.sampled_from(sorted(saved)))] = value
    found, message = None, ""
    try:
        found = from_json(saved)
    except ValueError as error:
        message = str(error)
    assert (found is None) == bool(message)
    assert "\n" not in message
    assert found is None or from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (None, "this is not the configuration of an experiment; there are digits, mnist-logistic"),
        ([], "this is not the configuration of an experiment"),
        ({}, "this is not the configuration of an experiment"),
        ({"experiment": "svhn"}, "this is not the configuration of an experiment"),
        ({"experiment": "digits"}, "of another version of digits: see activations, batch"),
        (Digits().to_json() | {"momentum": 0.9}, "of another version of digits: see momentum$"),
        (Digits().to_json() | {"format": 8}, "this is damaged: a format is"),
        (Digits().to_json() | {"method": []}, "this is damaged: "),
        (Digits().to_json() | {"lr": "0.1"}, "lr must be a finite number that is not negative, got '0.1'"),
    ],
)
def test_what_is_no_configuration_is_refused(saved: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(saved)


def test_what_differs_from_the_paper_is_said() -> None:
    config = Cifar10(seed=4, method="sgldfp", width=16, epochs=2, limit_train=1000, burn_in=0.5, workers=2)
    changes = [
        "epochs 2 instead of 245",
        "burn in 0.5 instead of 0.795918",
        "limit train 1000",
        "width 16 instead of 64",
    ]
    assert config.scaled == changes
    assert config.command == (
        "qlangevin run cifar10 --method sgldfp --format fp32 --seed 4 --epochs 2 --burn-in 0.5 --limit-train 1000 --width 16"
    )
    assert Cifar10(format="fixed8.8", activations="same").scaled == []


def test_names_of_runs() -> None:
    assert Imdb(seed=3).run_name == "vc-sgldlp-l-bfp8_tensor-seed3"  # a name, not a path
    assert Digits(method="sgdfp").run_name == "sgdfp-fp32-seed0"
    for preset in EXPERIMENTS.values():
        names = [preset(method=method, format=format).run_name for method, format in preset.rows]
        assert len(set(names)) == len(names)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sgd"}, "there is no method 'sgd'; there are sgdfp, sgldfp"),
        ({"format": "fixed8"}, "unknown format 'fixed8'; a format is written like"),
        ({"method": "sgdfp", "format": "bfp8"}, "SGDFP is in full precision; leave --format=bfp8 out"),
        ({"activations": "half"}, "unknown format 'half'"),
        ({"seed": -1}, "seed must be an integer between 0 and 2\\^64 - 1, got -1"),
        ({"seed": 1.5}, "seed must be an integer"),
        *[({name: 0}, f"{name} must be an integer, at least 1, got 0") for name in ("epochs", "batch", "samples", "cycles")],
        ({"cycle_samples": True}, "cycle_samples must be an integer, at least 1, got True"),
        ({"hidden": 0}, "hidden must be an integer, at least 1, got 0"),
        ({"hidden": -3}, "hidden must be an integer, at least 1, got -3"),
        ({"limit_train": 0}, "limit_train must be an integer, at least 1, got 0"),
        ({"limit_test": -1}, "limit_test must be an integer, at least 1, got -1"),
        ({"workers": -1}, "workers must be an integer, at least 0, got -1"),
        ({"lr": -0.1}, "lr must be a finite number that is not negative, got -0.1"),
        ({"lr": float("nan")}, "lr must be a finite number that is not negative, got nan"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number"),
        ({"temperature": -1}, "temperature must be a finite number that is not negative, got -1"),
        ({"burn_in": 1.01}, "burn_in must be a fraction, between 0 and 1, got 1.01"),
        ({"exploration": -0.1}, "exploration must be a fraction, between 0 and 1, got -0.1"),
    ],
)  # fmt: skip
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Digits(**options)


def test_sizes_of_every_experiment_are_checked() -> None:
    sizes = {
        "cifar10": ["width"],
        "imdb": ["length", "embedding", "hidden"],
        "imagenet": ["width", "size", "sampling_epochs"],
    }
    for name, those in sizes.items():
        preset: Any = EXPERIMENTS[name]
        for size in those:
            with pytest.raises(ValueError, match=f"^{size} must be an integer, at least 1, got 0"):
                preset(**{size: 0})
