"""Transformers of Hugging Face from tiny configurations: lowered, packed, sampled, generating, saved, stored, averaged."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import qlangevin as ql

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.helpers.transformer_models import EXAMPLES, MODELS, Batch, bert, collate, gpt2, llama, sampler_of, text

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def batches(name: str, count: int) -> list[Batch]:
    rows = MODELS[name][1]()
    return [collate([rows[(8 * i + j) % len(rows)] for j in range(8)]) for i in range(count)]


def eight_bits(model: Any) -> Any:
    return ql.pack(ql.lower(model, activations="bfp8", errors="bfp8"), weights="bfp8")


def train(model: Any, name: str, steps: int = 20, store: ql.SampleStore | None = None, **settings: Any) -> list[float]:
    """Sample for some steps; return the losses."""
    sampler, losses = sampler_of(model, **settings), []
    for i, batch in enumerate(batches(name, steps)):
        sampler.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        sampler.step()
        losses.append(float(loss.detach()))
        if store is not None and i >= steps - 4:
            store.append(model, step=i + 1)
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_sampled_saved_stored_and_averaged(name: str, tmp_path: Path) -> None:
    make = MODELS[name][0]
    model = eight_bits(make())
    with ql.SampleStore.create(tmp_path / "run", model) as store:
        losses = train(model, name, store=store, lr=0.1)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert sum(p.nbytes for p in model.parameters()) < 1.1 * sum(p.numel() for p in model.parameters())

    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    for (here, p), (there, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert here == there
        assert torch.equal(p.decode(), q)

    inputs = {k: v for k, v in batches(name, 1)[0].items() if k != "labels"}
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    posterior = ql.Posterior.open(tmp_path / "run", make(), class_dim=None if name in ("bert", "vit") else -1)
    probabilities = posterior.predict(inputs)
    assert torch.allclose(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))
    model.eval()
    last = ql.Posterior.open(store[-1], make(), class_dim=posterior.class_dim).predict(inputs)
    ql.unlower(model)
    assert torch.allclose(last, model(**inputs).logits.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_packed_model_generates_what_its_floats_do(make: Any) -> None:
    model = ql.pack(make(), weights="bfp8")
    prompt = torch.arange(2, 8)[None]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    packed = model.generate(prompt, **options)
    assert packed.shape[1] > 6
    assert torch.equal(packed, ql.unpack(model).generate(prompt, **options))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_lowered_model_generates_the_same_twice(make: Any) -> None:
    model = eight_bits(make()).eval()
    prompt = torch.arange(2, 8)[None]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(name: str, reentrant: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = eight_bits(MODELS[name][0]())
        if checkpointing:
            with (
                warnings.catch_warnings()
            ):  # transformers 5 would rather have it called activation_checkpointing_enable
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()  # without it, nothing is trained by the reentrant kind
        model.train()
        train(model, name, steps=3)
        found.append(torch.cat([p.decode().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_bfloat16_model_is_sampled(name: str, order: str) -> None:
    model = MODELS[name][0]()
    model = eight_bits(model.bfloat16()) if order == "before" else eight_bits(model).bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    losses = train(model, name, lr=0.1)
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_autocast_goes_with_a_lowered_and_packed_model(name: str) -> None:
    model = eight_bits(MODELS[name][0]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = train(model, name, lr=0.1)
    assert sum(losses[-4:]) < sum(losses[:4])


def test_the_signature_of_a_lowered_model_is_its_own() -> None:
    names = list(inspect.signature(bert().forward).parameters)
    assert list(inspect.signature(eight_bits(bert()).forward).parameters) == names


def test_layers_that_transformers_bring_along_are_lowered() -> None:
    for name, pattern in (("gpt2", "Conv1D"), ("llama", "LlamaRMSNorm"), ("llama", "SiLU")):
        model = ql.lower(MODELS[name][0](), activations="bfp8")
        wanted = [where for where, module in model.named_modules() if pattern in type(module).__name__]
        assert wanted
        assert all(where in ql.lowering.state_dict(model) for where in wanted)


# ---- accelerate


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_a_loop_of_accelerate_is_a_plain_loop(step_in_backward: bool) -> None:
    from accelerate import Accelerator

    found = []
    for accelerated in (False, True):
        model = eight_bits(bert())
        sampler = sampler_of(model, step_in_backward=step_in_backward)
        loader: Any = torch.utils.data.DataLoader(text(), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
        accelerator = Accelerator(cpu=True)
        if accelerated:
            model, prepared, loader = accelerator.prepare(model, sampler, loader)
        else:
            prepared = sampler
        for batch in loader:
            prepared.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss) if accelerated else loss.backward()
            prepared.step()
        found.append(torch.cat([p.decode().flatten() for p in model.parameters()]))
        assert len(loader) == EXAMPLES // 8
    assert torch.equal(*found)


def test_accelerate_accumulates_means() -> None:
    from accelerate import Accelerator

    found = []
    for passes in (1, 2):
        model = bert()
        sampler = sampler_of(model, temperature=0.0, gradients=None)
        loader: Any = torch.utils.data.DataLoader(text(16), batch_size=16 // passes, collate_fn=collate)  # type: ignore[arg-type]
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
        model, prepared, loader = accelerator.prepare(model, sampler, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                prepared.step()
                prepared.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(found[0], found[1], atol=1e-6)
