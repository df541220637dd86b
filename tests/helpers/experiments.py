"""Small experiments, the parts of a run that must repeat, and ways to interrupt one."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.presets import Digits, ImageNet

SMALL = Digits(
    format="bfp8", epochs=4, batch=25, lr=0.1, temperature=1.0, samples=9, burn_in=0.5, cycles=2, cycle_samples=2,
    exploration=0.5, limit_train=200, limit_test=120, hidden=12,
)  # fmt: skip
STEPS = 32  # of SMALL
TINY = ImageNet(method="sgldlp-f", epochs=2, sampling_epochs=1, samples=2, batch=3, width=2, size=32)


def of(method: MethodName) -> Digits:
    """Return the small experiment with another method."""
    return replace(SMALL, method=method, format="bfp8" if METHODS[method].low_precision else None)


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result that do not depend on the time it took."""
    return {name: value for name, value in result.items() if name not in ("seconds", "finished")}


def kept(folder: Path) -> dict[str, bytes]:
    """The samples, manifests and configurations of a run, byte for byte."""
    files = [*folder.rglob("samples/*"), *folder.rglob("manifest.json"), *folder.rglob("config.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


class Watch:
    """Progress that records each call, and acts after so many of them."""

    def __init__(self, after: int = -1, act: Callable[[], Any] = lambda: None) -> None:
        self.labels: list[str] = []
        self.total, self.after, self.act = 0.0, after, act

    def __call__(self, label: str, share: float) -> None:
        self.labels.append(label)
        self.total += share
        if len(self.labels) == self.after:
            self.act()


def press() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
