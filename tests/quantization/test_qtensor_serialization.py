"""QTensors through pickle, `torch.save` and `torch.load`."""

import io
import pickle

import torch
from torch import nn

from qlangevin import QTensor
from tests.helpers.qtensors import KINDS, coded


def test_saved_and_loaded_it_is_the_same() -> None:
    for name in KINDS:
        q = coded(name, 4, 6)
        for kept in (q, q.t(), nn.Parameter(q), q.to(torch.float64)):
            assert isinstance(kept, QTensor)
            buffer = io.BytesIO()
            torch.save(kept, buffer)
            buffer.seek(0)
            for loaded in (pickle.loads(pickle.dumps(kept)), torch.load(buffer, weights_only=False)):
                assert isinstance(loaded, QTensor)
                assert (loaded.format, loaded.dtype, loaded.shape) == (kept.format, kept.dtype, kept.shape)
                assert loaded.requires_grad == kept.requires_grad
                assert isinstance(loaded, nn.Parameter) == isinstance(kept, nn.Parameter)
                assert torch.equal(loaded.detach(), kept.detach())
                assert torch.equal(loaded.detach() * 2, kept.detach() * 2)


def test_it_is_safe_to_load() -> None:
    for name in ("bfp8", "fixed4.1", "fp8_e4m3"):
        buffer, q = io.BytesIO(), coded(name, 4, 6)
        torch.save({"weight": q}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["weight"]
        assert loaded.format == q.format
        assert torch.equal(loaded, q)
