"""Figures of the paper: Tables 1, 2 and 3 and its appendix as printed, in per cent, and the order of their rows."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["FAMILIES", "NEAREST", "PAPER", "ROWS", "TITLES"]

Key: TypeAlias = tuple[str, str]  # (family of formats, method)

TITLES = {
    "digits": "Digits (MLP)",
    "mnist-logistic": "MNIST (logistic regression)",
    "mnist-mlp": "MNIST (MLP)",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imdb": "IMDB",
    "imagenet": "ImageNet",
}

FAMILIES = {"fp32": "32-bit floating point", "fixed8": "8-bit fixed point", "bfp8": "8-bit block floating point"}

LOW = ("naive-sgldlp-l", "vc-sgldlp-l", "sgdlp-l", "sgldlp-f", "sgdlp-f")
ROWS: dict[str, tuple[str, ...]] = {
    "fp32": ("sgldfp", "sgdfp", "csgldfp"),
    "fixed8": LOW,
    "bfp8": (*LOW, "vc-csgldlp-l", "csgldlp-f"),
}

# CIFAR-10, CIFAR-100 and IMDB; ± is the standard error over three runs.
ERROR: dict[Key, tuple[str, str, str]] = {
    ("fp32", "sgldfp"): ("4.65 ± 0.06", "22.58 ± 0.18", "13.43 ± 0.21"),
    ("fp32", "sgdfp"): ("4.71 ± 0.02", "22.64 ± 0.13", "13.88 ± 0.29"),
    ("fp32", "csgldfp"): ("4.54 ± 0.05", "21.63 ± 0.04", "13.25 ± 0.18"),
    ("fixed8", "naive-sgldlp-l"): ("7.82 ± 0.13", "27.25 ± 0.13", "16.63 ± 0.28"),
    ("fixed8", "vc-sgldlp-l"): ("7.13 ± 0.01", "26.62 ± 0.16", "15.38 ± 0.27"),
    ("fixed8", "sgdlp-l"): ("8.53 ± 0.08", "28.86 ± 0.10", "19.28 ± 0.63"),
    ("fixed8", "sgldlp-f"): ("5.12 ± 0.06", "23.30 ± 0.09", "15.40 ± 0.36"),
    ("fixed8", "sgdlp-f"): ("5.20 ± 0.14", "23.84 ± 0.12", "15.74 ± 0.79"),
    ("bfp8", "naive-sgldlp-l"): ("5.85 ± 0.04", "26.38 ± 0.13", "14.64 ± 0.08"),
    ("bfp8", "vc-sgldlp-l"): ("5.51 ± 0.01", "25.22 ± 0.18", "13.99 ± 0.24"),
    ("bfp8", "sgdlp-l"): ("5.86 ± 0.18", "26.19 ± 0.11", "16.06 ± 1.81"),
    ("bfp8", "sgldlp-f"): ("4.58 ± 0.07", "22.59 ± 0.18", "14.05 ± 0.33"),
    ("bfp8", "sgdlp-f"): ("4.75 ± 0.05", "22.9 ± 0.13", "14.28 ± 0.17"),
    ("bfp8", "vc-csgldlp-l"): ("4.97 ± 0.10", "22.61 ± 0.12", "13.09 ± 0.27"),
    ("bfp8", "csgldlp-f"): ("4.32 ± 0.07", "21.50 ± 0.14", "13.13 ± 0.37"),
}

# CIFAR-10, weights rounded to nearest: the appendix on deterministic rounding.
NEAREST: dict[Key, str] = {("bfp8", "nearest-sgdlp-l"): "7.44", ("bfp8", "nearest-sgldlp-l"): "7.37"}

# CIFAR-10 and CIFAR-100. The naive method is not in this table.
ECE: dict[Key, tuple[str, str]] = {
    ("fp32", "sgldfp"): ("1.11", "3.92"),
    ("fp32", "sgdfp"): ("2.53", "4.97"),
    ("fp32", "csgldfp"): ("0.66", "1.38"),
    ("fixed8", "vc-sgldlp-l"): ("0.6", "3.19"),
    ("fixed8", "sgdlp-l"): ("3.4", "10.38"),
    ("fixed8", "sgldlp-f"): ("1.12", "4.42"),
    ("fixed8", "sgdlp-f"): ("3.05", "6.80"),
    ("bfp8", "vc-sgldlp-l"): ("0.6", "5.82"),
    ("bfp8", "sgdlp-l"): ("4.23", "12.97"),
    ("bfp8", "sgldlp-f"): ("1.19", "3.78"),
    ("bfp8", "sgdlp-f"): ("2.76", "5.2"),
    ("bfp8", "vc-csgldlp-l"): ("0.51", "1.39"),
    ("bfp8", "csgldlp-f"): ("0.56", "1.33"),
}

# Top-1 and top-5 error.
IMAGENET: dict[Key, tuple[str, str]] = {
    ("fp32", "sgldfp"): ("30.39", "10.76"),
    ("fp32", "sgdfp"): ("30.56", "10.97"),
    ("bfp8", "sgldlp-f"): ("31.47", "11.77"),
    ("bfp8", "sgdlp-f"): ("32.23", "12.09"),
}

# (experiment, score) -> (family, method) -> what is printed
PAPER: dict[Key, dict[Key, str]] = {
    ("cifar10", "error"): {row: cells[0] for row, cells in ERROR.items()} | NEAREST,
    ("cifar100", "error"): {row: cells[1] for row, cells in ERROR.items()},
    ("imdb", "error"): {row: cells[2] for row, cells in ERROR.items()},
    ("cifar10", "ece"): {row: cells[0] for row, cells in ECE.items()},
    ("cifar100", "ece"): {row: cells[1] for row, cells in ECE.items()},
    ("imagenet", "error"): {row: cells[0] for row, cells in IMAGENET.items()},
    ("imagenet", "top5"): {row: cells[1] for row, cells in IMAGENET.items()},
}
