"""Choose the settings of examples/huggingface.py by their likelihood on validation texts.

    python -m examples.huggingface_search [--data-dir DATA] [--no-pretrained]

Training and validation texts are drawn from those that examples/huggingface.py does not test with, with a seed of its own. AdamW:
all learning rates and weight decays; validation NLL is evaluated every 25 steps, and the best number of steps is taken. The
chains: one setting after the other is varied, and the best of each is kept. Both are judged by the validation NLL of what one run
gives: the last weights of AdamW, and the average over the samples of one chain. Prints the line for `SETTINGS`.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from torch import Tensor

import qlangevin as ql
from examples.huggingface import SETTINGS, AdamW, Chain, fine_tune, sample, to_examples
from examples.huggingface_model import Builder, find_encoder, to_8_bits
from examples.huggingface_scores import nll, predict_models, predict_samples, r_hat
from examples.huggingface_texts import Texts, read_texts

ADAMW = tuple(product((3e-4, 1e-3, 3e-3), (0.01, 0.1)))  # learning rate, weight decay
EVERY, LONGEST = 25, 200  # AdamW's steps
CHAIN: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("temperature", (1.0, 0.3, 0.1)),
    ("lr", (0.01, 0.02)),
)
FIRST = Chain(adapter_std=0.03, classifier_std=0.05, temperature=0.3, lr=0.02, steps=150, samples=8)
SEED, CHAINS = 1000, 1  # the seeds of the tests are others


class Validate(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is not looked into
    """Evaluate the NLL every few steps."""

    def __init__(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        self.inputs, self.labels, self.found = inputs, labels, dict[int, float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % EVERY == 0:
            given["model"].eval()
            self.found[state.global_step] = nll(predict_models([given["model"]], self.inputs)[0], self.labels)
            given["model"].train()


def search_adamw(builder: Builder, train: Texts, validation: Texts, folder: Path) -> AdamW:
    """Return the settings of AdamW, with the number of steps, of the least validation NLL."""
    inputs, labels = builder.inputs(train.texts, low=False), torch.tensor(validation.labels)
    builder.standardize_by(inputs)
    data, judged = to_examples(inputs, train.labels), builder.inputs(validation.texts, low=False)
    scores = {}
    for lr, weight_decay in ADAMW:
        callback = Validate(judged, labels)
        fine_tune(builder, data, folder, AdamW(lr, weight_decay, LONGEST), SEED, callback)
        steps, score = min(callback.found.items(), key=lambda found: found[1])
        scores[AdamW(lr, weight_decay, steps)] = score
        print(f"{score:.4f} {AdamW(lr, weight_decay, steps)}", flush=True)
    return min(scores, key=scores.__getitem__)


def judge(builder: Builder, data: Any, judged: Any, labels: Tensor, settings: Chain) -> float:
    """Run chains, and return the validation NLL of the average over their samples."""
    with tempfile.TemporaryDirectory() as folder:
        for chain in range(CHAINS):
            sample(builder, data, Path(folder), settings, SEED, chain)
        posterior = ql.Posterior.open(folder, to_8_bits(builder.build(0), SEED))
        each = predict_samples(posterior, judged)
    score = nll(each.mean(0), labels)
    print(
        f"{score:.4f} {settings}; one sample {nll(each[0], labels):.4f}, R-hat {r_hat(each, labels, CHAINS):.2f}",
        flush=True,
    )
    return score


def search_chain(builder: Builder, train: Texts, validation: Texts) -> Chain:
    """Return the settings of a chain; one after the other is varied."""
    data, labels = to_examples(builder.inputs(train.texts, low=True), train.labels), torch.tensor(validation.labels)
    judged, best = builder.inputs(validation.texts, low=True), FIRST
    scores: dict[Chain, float] = {}
    for name, values in CHAIN:
        candidates = [Chain(**best._asdict() | {name: value}) for value in values]
        for settings in candidates:
            if settings not in scores:
                scores[settings] = judge(builder, data, judged, labels, settings)
        best = min(candidates, key=scores.__getitem__)
    return best


def main(data_dir: Path | None = None, train: int = 400, test: int = 200, pretrained: bool = True) -> None:
    """Search, and print the settings.

    Args:
        data_dir: folder of IMDB; without it, and without $QLANGEVIN_DATA, the texts are docstrings.
        train: texts to train on, and as many to validate with.
        test: texts that are left for tests.
        pretrained: begin with MiniLM, if its package is installed.
    """
    data = read_texts(data_dir, test)
    encoder = find_encoder() if pretrained else None
    name = data.task if encoder else f"{data.task}, bytes"
    builder = Builder(encoder, max(data.test.labels) + 1, SETTINGS[name].length)
    training, rest = data.known.draw(train, SEED)
    validation, _ = rest.draw(train, SEED)
    with tempfile.TemporaryDirectory() as folder:
        adamw = search_adamw(builder, training, validation, Path(folder))
    chosen = SETTINGS[name]._replace(adamw=adamw, chain=search_chain(builder, training, validation))
    print(f'"{name}": {chosen}')


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
