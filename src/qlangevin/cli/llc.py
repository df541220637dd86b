"""The command ``llc``: the local learning coefficient of a Hugging Face model, or of a network that ``run`` has trained."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from .._progress import SELDOM, progress_bar
from .._validate import check_integer
from .._warnings import QLangevinWarning
from ..distributed.ranks import TIMEOUT, join
from ..experiments import presets
from ..experiments.chain import build_network
from ..experiments.data import load_dataset, make_loader
from ..slt import supervised, token_losses
from ..slt.losses import Loss
from ..storage import files
from ..storage.sample import chain_folders
from ..storage.store import SampleStore
from . import display
from .errors import fail

if TYPE_CHECKING:
    from ..slt import LLC

__all__ = ["Llc"]


@dataclass(frozen=True)
class Llc:
    """Estimate the local learning coefficient of a trained network, in bf16 or 8 bits."""

    network: Annotated[Path, tyro.conf.Positional]
    """Folder of a Hugging Face language model, or of a run of SGD (`qlangevin run digits --method sgdfp`)."""
    lr: float
    """Stepsize ε of the chains, as in devinterp."""
    localization: float
    """Strength γ of the pull towards the trained weights."""
    text: Path | None = None
    """For a language model: a text file, the data of its loss."""
    length: int = 128
    """Tokens of a sequence of the text."""
    batch: int = 16
    """Sequences or examples in a batch."""
    limit: int | None = None
    """Take the first sequences or examples only."""
    nbeta: float | None = None
    """Inverse temperature nβ; by default n / log n."""
    weights: str = "bf16"
    """Format of the chains' weights: fp32, bf16, bfp8, bfp8/16 or another."""
    sampler: Literal["sgld", "rms", "sghmc"] = "sgld"
    """Sampler."""
    friction: float = 0.1
    """Friction of sghmc."""
    chains: int = 4
    """Chains; the ranks of torchrun share them."""
    draws: int = 200
    """Draws of each chain."""
    burn_in: int | None = None
    """Steps before the first draw; by default half as many as after it."""
    steps_between: int = 1
    """Steps for each draw."""
    masks: tuple[str, ...] = ()
    """Patterns of parameter names: an estimate for each, all other weights fixed. By default all weights move."""
    box: float | None = None
    """Weights stay this close to the trained ones."""
    seed: int = 0
    """Seed of all random bits."""
    out: Path | None = None
    """Folder of the draws and of a page; the same command resumes what was interrupted there."""
    data_dir: Path | None = None
    """Folder of the data set of a run."""
    json: bool = False
    """Print one JSON object instead of a table, and no progress."""
    timeout: float = TIMEOUT
    """Of several ranks: seconds until one that gives no sign of life is missed."""

    def execute(self) -> int:
        check_integer("batch", self.batch, 1)
        try:
            with join(timeout=self.timeout) as ranks, warnings.catch_warnings():
                warnings.simplefilter("ignore", QLangevinWarning)  # remarks are printed
                result = self._estimate(ranks.first)
        except KeyboardInterrupt:
            return fail("interrupted" if self.out is None else "interrupted; the same command resumes", 130)
        if ranks.first:
            self._show(result)
        return 0

    def _estimate(self, first: bool) -> LLC:
        from ..slt import llc

        model, loader, loss = self._open()
        masks = {pattern: pattern for pattern in self.masks} or None
        steps = self.draws * self.steps_between
        total = (steps + (steps // 2 if self.burn_in is None else self.burn_in)) * self.chains * max(1, len(self.masks))
        same = (
            "lr", "localization", "nbeta", "sampler", "friction", "chains", "draws", "burn_in", "steps_between", "box", "seed",
        )  # fmt: skip
        with progress_bar(float(total), "sampling", shown=first and not self.json, lines=SELDOM) as advance:
            return llc(
                model, loader, loss, weights=self.weights, masks=masks, store=self.out,
                progress=lambda steps: advance("sampling", steps), **{name: getattr(self, name) for name in same},
            )  # fmt: skip

    def _show(self, result: LLC) -> None:
        parts = list(result.parts.values())
        remarks = [f"{part.name}: {remark}" for part in parts for remark in part.remarks]
        page = None if self.out is None else self._write_page(result, remarks)
        if self.json:
            found = {"parts": [part.to_json() for part in parts], "page": None if page is None else str(page)}
            display.print_json(found)
            return
        display.print_tables(display.llc_table(parts))
        display.print_lines(*remarks, *([] if page is None else [f"page: {page}"]))

    def _write_page(self, result: LLC, remarks: list[str]) -> Path:
        from ..experiments.report.learning import write_llc_page

        assert self.out is not None
        return write_llc_page(result, self.out, f"Learning coefficient of {self.network}", remarks)

    # ---- networks and their data

    def _open(self) -> tuple[nn.Module, DataLoader[Any], Loss]:
        file = self.network / presets.CONFIG
        if not file.is_file():
            raise ValueError(
                f"{self.network} is no folder of a network: it has no {presets.CONFIG}. Give that of a Hugging Face model, or of "
                "a run of `qlangevin run`"
            )
        about = files.parse_json(files.read(file, f"the configuration {file}"), f"the configuration {file}")
        language = isinstance(about, dict) and "model_type" in about
        return self._open_language_model() if language else self._open_run()

    def _open_run(self) -> tuple[nn.Module, DataLoader[Any], Loss]:
        """Return the network of a run with its last weights, and the data it was trained on, not augmented."""
        config = presets.read_config(self.network)
        options = {**config.load_options(), "augment": False}
        data = load_dataset(config.data, self.data_dir, **options)
        model, store = build_network(config, data), SampleStore.open(chain_folders(self.network)[0])
        if len(store) == 0:
            raise ValueError(f"the run in {self.network} has no weights yet; finish it with `qlangevin run`")
        store[-1].load_into(model)
        train = data.train if self.limit is None else data.train.first(self.limit)
        return model, make_loader(train, self.batch, shuffle=True), supervised(cross_entropy)

    def _open_language_model(self) -> tuple[nn.Module, DataLoader[Any], Loss]:
        """Return a causal language model, and the text in sequences of equal length."""
        if self.text is None:
            raise ValueError("a language model needs a text to measure its loss on: --text FILE")
        words = self.text.read_text(encoding="utf-8")  # a wrong path is said before transformers takes its seconds
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise ValueError(
                "language models need transformers, which is not installed: pip install qlangevin[huggingface]"
            ) from None
        model = AutoModelForCausalLM.from_pretrained(self.network, local_files_only=True)
        numbers = AutoTokenizer.from_pretrained(self.network, local_files_only=True)(words)["input_ids"]
        length = check_integer("length", self.length, 2)
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and length > most:
            raise ValueError(f"--length={length} is longer than the {most} tokens that the model has positions for")
        count = len(numbers) // length if self.limit is None else min(self.limit, len(numbers) // length)
        if count < 1:
            raise ValueError(f"{self.text} has {len(numbers)} tokens, fewer than one sequence of --length={length}")
        ids = torch.tensor(numbers[: count * length]).view(count, length)
        known = model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= known:
            raise ValueError(
                f"the tokenizer gives token {int(ids.max())}, and the model has {known}: they do not belong together"
            )
        return model, DataLoader(TensorDataset(ids), batch_size=min(self.batch, count)), _first_of_batch


def _first_of_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    return token_losses(model, batch[0])
