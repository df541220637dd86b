"""Scores of examples/huggingface.py: error, NLL and calibration, the AUROC of out-of-distribution texts, bytes and R-hat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import qlangevin as ql

BATCH = 50
COLUMNS = (("error", 100, 1), ("nll", 1, 3), ("ece", 100, 1), ("auroc", 1, 3))  # name, factor, digits
Scores = dict[str, float]


def split(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the batches of inputs."""
    parts = zip(*(column.split(BATCH) for column in inputs.values()), strict=True)
    return [dict(zip(inputs, part, strict=True)) for part in parts]


def predict_models(models: Sequence[nn.Module], inputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of each model: [model, text, class]."""
    with torch.no_grad():
        each = [torch.cat([model(**batch).logits.softmax(1) for batch in split(inputs)]) for model in models]
    return torch.stack(each)


def predict_samples(posterior: ql.Posterior, inputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of each sample: [sample, text, class], one chain after the other."""
    return torch.cat([posterior.samples(batch) for batch in split(inputs)], 1)


def nll(probabilities: Tensor, labels: Tensor) -> float:
    return ql.metrics.evaluate(probabilities, labels)["nll"]


def r_hat(probabilities: Tensor, labels: Tensor, chains: int) -> float:
    """Return R-hat across chains of the log-likelihood of all texts, NaN for fewer than four samples of each."""
    log_likelihood = probabilities[:, torch.arange(len(labels)), labels].clamp_min(1e-12).log().sum(1)
    draws = log_likelihood.view(chains, -1).double()
    return float(ql.diagnostics.summarize(draws).r_hat) if draws.shape[1] >= 4 else float("nan")


class Predictions(NamedTuple):
    """Probabilities of test texts and of out-of-distribution texts, [member, text, class], and the bytes of a member."""

    test: Tensor
    outside: Tensor
    bytes: int

    def score(self, labels: Tensor, count: int) -> Scores:
        """Return the scores of the average of the first ``count`` members."""
        inside, outside = self.test[:count].mean(0), self.outside[:count].mean(0)
        entropies = [torch.special.entr(p).sum(1) for p in (inside, outside)]
        own = {"auroc": ql.metrics.auroc(*entropies), "bytes": float(count * self.bytes)}
        return ql.metrics.evaluate(inside, labels) | own

    def score_each(self, labels: Tensor) -> Scores:
        """Return the mean over members of the scores that each has by itself."""
        each = [Predictions(self.test[i : i + 1], self.outside[i : i + 1], self.bytes) for i in range(len(self.test))]
        scores = [one.score(labels, 1) for one in each]
        return {key: sum(s[key] for s in scores) / len(scores) for key in scores[0]}


def summarize(runs: Sequence[dict[str, Scores]]) -> dict[str, Scores]:
    """Print the mean over seeds with its standard error; return the means."""
    print(f"{'':36}{'error %':>14}{'NLL':>16}{'ECE %':>14}{'AUROC OOD':>16}{'kB':>8}{'R-hat':>7}")
    means = {}
    for name in runs[0]:
        table = {key: torch.tensor([r[name][key] for r in runs], dtype=torch.float64) for key in runs[0][name]}
        mean = means[name] = {key: float(values.mean()) for key, values in table.items()}
        line = f"{name:36}"
        for (key, factor, digits), width in zip(COLUMNS, (14, 16, 14, 16), strict=True):
            error = f" ± {factor * float(table[key].std()) / len(runs) ** 0.5:.{digits}f}" if len(runs) > 1 else ""
            line += f"{f'{factor * mean[key]:.{digits}f}{error}':>{width}}"
        hat = f"{max(table['r_hat']):.2f}" if "r_hat" in table else ""  # of the worst seed
        print(f"{line}{mean['bytes'] / 1000:8,.0f}{hat:>7}")
    point, *_, average = means.values()
    for key in ("nll", "ece", "auroc"):
        better = average[key] > point[key] if key == "auroc" else average[key] < point[key]
        print(f"{key}: the average over samples is {'better' if better else 'NOT better'} than one AdamW run")
    return means
