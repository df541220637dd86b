"""Learning coefficients of a Hugging Face language model, in Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import qlangevin as ql
from qlangevin.cli.main import main
from tests.helpers.transformer_models import VOCABULARY, gpt2

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::qlangevin.QLangevinWarning")


def sentences() -> DataLoader[Any]:
    ids = torch.randint(VOCABULARY, (24, 12), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row} for row in ids], batch_size=8)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "bf16", "bfp8", "bfp8/16"])
def test_a_language_model_with_tied_weights(weights: str | None) -> None:
    model = gpt2()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    heads = {"head 0 of layer 1": {"transformer.h.1.attn.c_attn.weight": (slice(None), slice(0, 16))}}
    found = ql.slt.llc(
        model, sentences(), lr=1e-5, localization=100.0, weights=weights, chains=2, draws=6,
        observables={"train": sentences()}, masks={"full": "*", **heads},
    )  # fmt: skip
    assert found.observables["train"].shape == (2, 6, 24, 11)
    assert found.parts["head 0 of layer 1"].size == 32 * 16
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.slow
def test_the_command_line_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    gpt2().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i % VOCABULARY) for i in range(200)))
    capsys.readouterr()
    arguments = ["llc", str(tmp_path / "model"), "--text", str(text), "--length", "12", "--lr", "1e-5"]
    arguments += ["--localization", "100", "--chains", "1", "--draws", "5", "--json"]
    assert main(arguments) == 0
    [part] = json.loads(capsys.readouterr().out)["parts"]
    assert part["settings"]["num_data"] == 16
    assert main([*arguments, "--length", "999"]) == 2
    assert "--length=999 is longer than the" in capsys.readouterr().err
    text.write_text("1 2 3")
    assert main(arguments) == 2
    assert "has 3 tokens, fewer than one sequence" in capsys.readouterr().err
    words = {str(i): i for i in range(2 * VOCABULARY)}  # a tokenizer of another model
    other = Tokenizer(models.WordLevel(words, unk_token="0"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "model")
    text.write_text(" ".join(words))
    assert main(arguments) == 2
    assert "do not belong together" in capsys.readouterr().err
