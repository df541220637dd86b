# %% [markdown]
# # A transformer's adapter
#
# We sample the LoRA adapter of a small BERT in 8 bits, on a base that is packed into 8 bits and stored only as a
# checksum. With your own model, replace `build` by `from_pretrained`. It needs `pip install '.[huggingface]'
# peft`.
#
# The base learns to tell in which quarter of the vocabulary the first of 12 tokens is. The adapter, with a new
# classifier, has another task, and 64 examples of it, a tenth of them with the wrong label: is it in one of the two
# middle quarters?

# %%
import copy

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import qlangevin as ql

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.manual_seed(0)
VOCABULARY = 40


def draw(count):
    tokens = torch.randint(0, VOCABULARY, (count, 12))
    return tokens, tokens[:, 0] * 4 // VOCABULARY  # the quarter


def build(classes):
    config = BertConfig(
        vocab_size=2 * VOCABULARY,
        num_labels=classes,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,  # dropout would make it another distribution
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


pretrained = build(4)
optimizer = torch.optim.AdamW(pretrained.parameters(), lr=3e-3)
for _ in range(300):
    tokens, quarters = draw(64)
    optimizer.zero_grad()
    pretrained(input_ids=tokens, labels=quarters).loss.backward()
    optimizer.step()
print(f"loss of the base on its own task: {pretrained(input_ids=tokens, labels=quarters).loss.item():.3f}")

# %% [markdown]
# ## An adapter, tuned by AdamW
#
# Sampling begins where ordinary fine-tuning ends.


# %%
def task(count):
    tokens, quarters = draw(count)
    labels = ((quarters == 1) | (quarters == 2)).long()
    return tokens, torch.where(torch.rand(count) < 0.1, 1 - labels, labels)


tokens, labels = task(64)
test_tokens, test_labels = task(1000)
base = build(2)
base.bert.load_state_dict(pretrained.bert.state_dict())
adapter = LoraConfig(
    task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["classifier"]
)
tuned = get_peft_model(copy.deepcopy(base), adapter)
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
for _ in range(100):
    optimizer.zero_grad()
    tuned(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
tuned.eval()
with torch.no_grad():
    point = tuned(input_ids=test_tokens).logits.softmax(1)

# %% [markdown]
# ## Sampling it
#
# `pack(frozen=True)` keeps the base in one byte per weight as well. `num_data` is the number of examples, because the
# loss is a mean over examples; for a language model it would be the number of predicted tokens. The prior of an adapter
# is narrow, because its update is a product of two factors. Here it is 0.5, because base and task are tiny; for a
# pretrained model begin with 0.03 to 0.05 ([why](../transformers.md#lora)). Of a sample this small most bytes are the
# names of its tensors.

# %%
model = get_peft_model(copy.deepcopy(base), adapter)
model.load_state_dict(tuned.state_dict())
ql.lower(model, activations="bfp8/32", errors="bfp8/32")
ql.pack(model, weights="bfp8", frozen=True)
trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
sampler = ql.SGLD(trained, lr=0.05, num_data=len(labels), prior_std=0.5, temperature=1.0, gradients="bfp8")
schedule = ql.ConstantLR(sampler, total_steps=400, samples=30)
with ql.SampleStore.create("adapter", model, sampler, schedule, frozen="reference") as store:
    for _ in range(schedule.total_steps):
        sampler.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        sampler.step()
        schedule.step()
        if schedule.collect:
            store.append(model)
weights = sum(p.numel() for _, p in trained)
print(f"{store.manifest.samples[0].digest.size} bytes per sample, {weights} weights")

# %% [markdown]
# ## Predictions
#
# `Posterior.open` compares the base with the checksum. Foreign tokens, which neither base nor adapter has seen, should
# have a higher entropy.

# %%
posterior = ql.Posterior.open("adapter", model)
foreign = test_tokens + VOCABULARY
with torch.no_grad():
    point_foreign = tuned(input_ids=foreign).logits.softmax(1)


def entropy(probabilities):
    return torch.special.entr(probabilities).sum(1)


print(f"{'':24}{'error':>8}{'NLL':>8}{'ECE':>8}{'AUROC of foreign tokens':>26}")
rows = {
    "AdamW, FP32": (point, point_foreign),
    f"average of {len(posterior)}, 8 bits": [posterior.predict({"input_ids": t}) for t in (test_tokens, foreign)],
}
for name, (inside, outside) in rows.items():
    s = ql.metrics.evaluate(inside, test_labels)
    auroc = ql.metrics.auroc(entropy(inside), entropy(outside))
    print(f"{name:24}{s['error']:8.1%}{s['nll']:8.3f}{s['ece']:8.1%}{auroc:26.3f}")

# %% [markdown]
# One seed, one chain, a toy task with wrong labels, and AdamW without early stopping. On a [real
# encoder](../transformers.md#a-real-encoder) the samples were *not* better calibrated.
#
# ## Do the bits suffice?

# %%
found = sampler.diagnose()
print(f"inflation {found.total.inflation:.2f}; the bits suffice: {found.sufficient}")

# %% [markdown]
# With the Hugging Face Trainer, pass `optimizers=(sampler, schedule)` and a `SampleCallback`: [Transformers and
# LoRA](../transformers.md) says what each of its settings does to the posterior.
