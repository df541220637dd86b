"""The callback of the Hugging Face Trainer: it collects, resumes to the byte, reports, and refuses what biases the chain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qlangevin as ql
from tests.helpers.stores import read_files

pytest.importorskip("transformers", reason="transformers is not installed")

from qlangevin.integrations.huggingface import FILE, SampleCallback
from tests.helpers import transformer_models as models
from tests.helpers.transformer_models import arguments, bert, gpt2, sampler_of, sentences, text, trainer


def run(folder: Path, steps: int = 12, resume: bool = False, prepare: Any = None, **changes: Any) -> SampleCallback:
    """Sample Bert for some steps, lowered and packed; return the callback."""
    settings = changes.pop("settings", {})
    model = bert() if prepare is None else prepare(bert())
    sampler = sampler_of(model, **settings)
    schedule = ql.ConstantLR(sampler, 12, 6)
    callback = SampleCallback(folder / "run")
    made = trainer(model, arguments(folder / "out", steps, **changes), text(), (sampler, schedule), callback)
    made.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-5") if resume else None)
    return callback


def eight_bits(model: Any) -> Any:
    model.accepts_loss_kwargs = False
    return ql.pack(ql.lower(model, activations="bfp8", errors="bfp8"), weights="bfp8")


def test_samples_are_collected_when_the_schedule_says_so(tmp_path: Path) -> None:
    callback = run(tmp_path, settings={"weights": "bfp8"})
    assert callback.store is not None
    assert [sample.step for sample in callback.store] == [7, 8, 9, 10, 11, 12]
    posterior = ql.Posterior.open(tmp_path / "run", bert(seed=3), forward=lambda model, batch: model(**batch).logits)
    batch = models.collate(text(8, seed=2))
    probabilities = posterior.predict({"input_ids": batch["input_ids"]})
    assert probabilities.shape == (8, 2)
    assert torch.allclose(probabilities.sum(1), torch.ones(8))


def test_samples_are_collected_every_so_many_steps_after_the_burn_in(tmp_path: Path) -> None:
    model = bert()
    callback = SampleCallback(tmp_path / "run", every=3, burn_in=2)
    args = arguments(tmp_path / "out", lr_scheduler_type="constant")
    trainer(model, args, text(), (sampler_of(model), None), callback).train()
    assert callback.store is not None
    assert [sample.step for sample in callback.store] == [5, 8, 11]


@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_run_has_the_store_of_one_that_was_not_interrupted(tmp_path: Path, packed: bool) -> None:
    settings: dict[str, Any] = (
        {"prepare": eight_bits} if packed else {"settings": {"weights": "bfp8", "accumulator": "fp32"}}
    )
    whole = run(tmp_path / "whole", **settings)
    run(tmp_path / "parts", steps=8, **settings)
    resumed = run(tmp_path / "parts", resume=True, **settings)
    assert read_files(tmp_path / "parts" / "run") == read_files(tmp_path / "whole" / "run")
    assert torch.equal(resumed.losses, whole.losses)


def test_a_checkpoint_without_the_file_of_the_callback_is_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=8)
    (tmp_path / "out" / "checkpoint-5" / FILE).unlink()
    with pytest.raises(FileNotFoundError, match="resumes at step 5, but there is no"):
        run(tmp_path, resume=True)


def test_losses_of_samples_are_those_that_the_trainer_logs(tmp_path: Path) -> None:
    model = bert()
    callback = SampleCallback(tmp_path / "run", every=4)
    args = arguments(tmp_path / "out", logging_steps=4, lr_scheduler_type="constant")
    made = trainer(model, args, text(), (sampler_of(model), None), callback)
    made.train()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert callback.losses.tolist() == pytest.approx(logged, abs=1e-4)  # the Trainer rounds to four digits


def test_the_report_has_r_hat_and_the_log_too(tmp_path: Path) -> None:
    model = bert()
    callback = SampleCallback(tmp_path / "run", every=1)
    made = trainer(
        model,
        arguments(tmp_path / "out", lr_scheduler_type="constant"),
        text(),
        (sampler_of(model, lr=1e-6), None),
        callback,
    )
    assert "0 samples of 0 bytes; training loss nan; no R-hat, for which it takes 8 samples" in str(callback.report())
    made.train()
    report = callback.report()
    assert report.samples == 12
    assert 0.5 < report.r_hat < 2
    assert "12 samples of" in str(report)
    assert "R-hat" in str(report)
    assert any("loss_r_hat" in entry for entry in made.state.log_history)


def test_a_chain_that_is_on_its_way_is_warned_of(tmp_path: Path) -> None:
    model = gpt2()
    model.accepts_loss_kwargs = False  # the Trainer would count labels that are not predicted
    args = arguments(tmp_path / "out", 60, lr_scheduler_type="constant")
    sampler = sampler_of(model, terms=models.EXAMPLES * 11, lr=0.1)
    made = trainer(model, args, sentences(), (sampler, None), SampleCallback(tmp_path / "run", every=4))
    with pytest.warns(ql.QLangevinWarning, match="R-hat of the training loss"):
        made.train()


# ---- gradient accumulation


def gradient(
    passes: int, folder: Path, make: Any = bert, data: Any = text, averages: bool = False, **config: Any
) -> tuple[Tensor, Tensor]:
    """Return the weights after one step without noise on all the data, and the loss that the callback was told."""
    model = make(**config)
    model.accepts_loss_kwargs = averages
    sampler = sampler_of(
        model, temperature=0.0, gradients=None, lr=0.1, terms=models.EXAMPLES * (11 if data is sentences else 1)
    )
    callback = SampleCallback(folder / f"run-{passes}", every=1)
    args = arguments(
        folder / f"out-{passes}", 1, gradient_accumulation_steps=passes, lr_scheduler_type="constant",
        per_device_train_batch_size=models.EXAMPLES // passes,
    )  # fmt: skip
    trainer(model, args, data(), (sampler, None), callback).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), callback.losses


@pytest.mark.parametrize(("make", "data"), [(bert, text), (gpt2, sentences)])
def test_an_accumulated_gradient_is_the_mean(tmp_path: Path, make: Any, data: Any) -> None:
    (once, loss), (accumulated, same_loss) = (gradient(passes, tmp_path, make, data) for passes in (1, 4))
    assert torch.allclose(once, accumulated, atol=1e-5)
    assert torch.allclose(loss, same_loss, atol=1e-5)


def test_labels_that_are_not_predicted_are_counted_over_all_micro_batches(tmp_path: Path) -> None:
    """The Trainer divides a loss of GPT-2 by 48 sentences of 12 labels; 11 of each are predicted."""
    losses = []
    for passes in (1, 4):
        with pytest.warns(ql.QLangevinWarning, match=r"by 576 labels, of which it predicts 528"):
            losses += [gradient(passes, tmp_path, gpt2, sentences, averages=True)[1]]
    mean = gradient(2, tmp_path, gpt2, sentences)[1]
    assert torch.allclose(torch.cat(losses), mean * 11 / 12, atol=1e-5)


def test_a_model_that_does_not_average_over_micro_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"4 times too large. Set model.accepts_loss_kwargs = False"):
        gradient(4, tmp_path, averages=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_in_backward_accumulate_as_the_trainer_does(tmp_path: Path, accumulate: int) -> None:
    settings = {"step_in_backward": True, "accumulate": accumulate}
    same: dict[str, Any] = {"prepare": eight_bits, "gradient_accumulation_steps": accumulate, "save_strategy": "no"}
    whole, plain = run(tmp_path / "in", settings=settings, **same), run(tmp_path / "after", **same)
    assert torch.equal(whole.losses, plain.losses)


def test_steps_in_backward_with_other_passes_than_the_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4.*accumulate=1.*accumulate=4\)"):
        run(tmp_path, settings={"step_in_backward": True}, gradient_accumulation_steps=4)


# ---- other settings


def test_a_loss_that_is_a_sum_is_warned_of(tmp_path: Path) -> None:
    model = summing(bert())
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    made = trainer(model, args, text(), (sampler_of(model), None), SampleCallback(tmp_path / "run", every=1))
    with pytest.warns(ql.QLangevinWarning, match=r"the loss is a sum over \d+ examples"):
        made.train()


def summing(model: Any) -> Any:
    """Return a model whose loss is the sum over a batch."""
    forward = model.forward

    def summed(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = forward(input_ids=input_ids).logits
        return {"loss": torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), "logits": logits}

    model.forward = summed
    return model


def test_clipping_is_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"clips gradients to the norm 1.*max_grad_norm=0"):
        run(tmp_path / "refused", max_grad_norm=1.0)
    model = bert()
    callback = SampleCallback(tmp_path / "run", every=4, allow_clipping=True)
    args = arguments(tmp_path / "out", max_grad_norm=1.0, lr_scheduler_type="constant")
    trainer(model, args, text(), (sampler_of(model), None), callback).train()
    assert callback.report().samples == 3
    with pytest.raises(ValueError, match="there are none left to clip"):
        run(tmp_path / "in-backward", max_grad_norm=1.0, settings={"step_in_backward": True})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="only a sampler's weights are samples, but the optimizer is AdamW"):
        trainer(
            bert(), arguments(tmp_path / "out"), text(), (None, None), SampleCallback(tmp_path / "run", every=1)
        ).train()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"weight_decay": 0.1}, "weight_decay=0.1 of TrainingArguments has no effect"),
        ({"label_smoothing_factor": 0.1}, "no log-likelihood of the labels"),
        ({"neftune_noise_alpha": 5.0}, "noise that the posterior knows nothing of"),
        ({"lr_scheduler_type": "linear"}, r"schedule \(linear\) takes the learning rate to zero"),
    ],
)
def test_doubtful_settings_are_warned_of(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    model = bert()
    args = arguments(tmp_path / "out", 2, **({"lr_scheduler_type": "constant"} | setting))
    made = trainer(model, args, text(), (sampler_of(model), None), SampleCallback(tmp_path / "run", every=1))
    with pytest.warns(ql.QLangevinWarning, match=message):
        made.train()


def test_several_processes_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out")
    model = bert()
    made = trainer(model, args, text(), (sampler_of(model), None), SampleCallback(tmp_path / "run", every=1))
    args.__class__.n_gpu, old = property(lambda self: 2), args.__class__.n_gpu
    try:
        callback = SampleCallback(tmp_path / "run", every=1)
        with pytest.raises(ValueError, match=r"over 2 GPUs by nn.DataParallel"):
            callback.on_train_begin(
                args, made.state, made.control, model=model, optimizer=made.optimizer, lr_scheduler=None
            )
    finally:
        args.__class__.n_gpu = old


def test_num_data_that_counts_sentences_instead_of_tokens_is_warned_of(tmp_path: Path) -> None:
    model = gpt2()
    model.accepts_loss_kwargs = False  # the Trainer would count labels that are not predicted
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    made = trainer(model, args, sentences(), (sampler_of(model), None), SampleCallback(tmp_path / "run", every=1))
    with pytest.warns(
        ql.QLangevinWarning, match=r"48 examples of about 11 labels .* N is about 528, going by the"
    ) as caught:
        made.train()
    (message,) = {str(one.message) for one in caught if "num_data" in str(one.message)}
    assert eval(message.split("count it: ")[1], {"trainer": made}) == 528


def test_labels_that_are_not_predicted_are_warned_of(tmp_path: Path) -> None:
    model = gpt2()
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    sampler = sampler_of(model, num_data=528)
    made = trainer(model, args, sentences(), (sampler, None), SampleCallback(tmp_path / "run", every=1))
    with pytest.warns(ql.QLangevinWarning, match=r"loss of GPT2LMHeadModel by 96 labels, of which it predicts 88"):
        made.train()


def test_attention_dropout_of_a_config_is_warned_of(tmp_path: Path) -> None:
    model = models.llama()
    model.config.attention_dropout = 0.1
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    sampler = sampler_of(model, num_data=528)
    made = trainer(model, args, sentences(), (sampler, None), SampleCallback(tmp_path / "run", every=1))
    with pytest.warns(ql.QLangevinWarning, match=r"attention_dropout=0.1 in the model's config"):
        made.train()


def test_a_sampler_of_another_model_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    callback = SampleCallback(tmp_path / "run", every=1)
    made = trainer(bert(), args, text(), (sampler_of(bert()), None), callback)
    with pytest.raises(ValueError, match=r"\d+ of the sampler's \d+ parameters are not the model's"):
        made.train()


def test_a_model_that_is_all_frozen_is_refused(tmp_path: Path) -> None:
    model = bert().requires_grad_(False)
    args = arguments(tmp_path / "out", 2, lr_scheduler_type="constant")
    sampler = ql.SGLD(model.parameters(), lr=0.02, num_data=48)
    made = trainer(model, args, text(), (sampler, None), SampleCallback(tmp_path / "run", every=1))
    with pytest.raises(ValueError, match="has requires_grad=True: there is nothing to sample"):
        made.train()


def test_without_a_schedule_of_qlangevins_every_must_be_given(tmp_path: Path) -> None:
    model = bert()
    args = arguments(tmp_path / "out", lr_scheduler_type="constant")
    with pytest.raises(ValueError, match=r"does not know when to collect.*every="):
        trainer(model, args, text(), (sampler_of(model), None), SampleCallback(tmp_path / "run")).train()
    with pytest.raises(ValueError, match="burn_in=3 goes with every="):
        SampleCallback(tmp_path / "run", burn_in=3)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(tmp_path: Path, reentrant: bool) -> None:
    settings: dict[str, Any] = {"activation_checkpointing": True}
    settings["activation_checkpointing_kwargs"] = {"use_reentrant": reentrant}

    def prepare(model: Any) -> Any:
        if reentrant:
            model.enable_input_require_grads()
        return eight_bits(model)

    plain = run(tmp_path / "plain", prepare=prepare)
    checkpointed = run(tmp_path / "checkpointed", prepare=prepare, **settings)
    assert torch.equal(plain.losses, checkpointed.losses)


def test_autocast_in_bfloat16_samples_a_model_in_8_bits(tmp_path: Path) -> None:
    plain, half = run(tmp_path / "plain", prepare=eight_bits), run(tmp_path / "half", prepare=eight_bits, bf16=True)
    assert half.store is not None
    assert len(half.store) == 6
    assert not torch.equal(plain.losses, half.losses)  # autocast was on
    assert torch.allclose(plain.losses, half.losses, atol=0.3)
