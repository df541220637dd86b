"""Exports of a posterior: files of one sample for other programs, and the posterior itself, sent to another process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..storage import files
from ..storage.errors import explain_errors
from ..storage.folders import is_folder
from ..storage.tensor_file import tensor_chunks
from .calling import Forward

__all__ = ["check_picklable", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file, all of it or nothing; raise IsADirectoryError for a folder."""
    if is_folder(path):
        raise IsADirectoryError(
            f"{path} is a folder; name a file in it, such as {path / 'model.safetensors'}, or let the model write all of them: "
            "model.save_pretrained(folder, state_dict=posterior.export(i))"
        )
    with explain_errors(path, "the sample was not exported"):
        plain = {name: t.cpu().contiguous() for name, t in tensors.items()}
        files.write(path, tensor_chunks(plain, {"format": "pt"}))


def check_picklable(forward: Forward | None) -> None:
    """Raise TypeError for a ``forward`` that another process could not find."""
    try:
        pickle.dumps(forward)
    except Exception as error:
        raise TypeError(
            f"forward={forward!r} cannot be sent to another process ({error}); define it with def at the top of a module"
        ) from None
