# %% [markdown]
# # Learning coefficients
#
# The local learning coefficient (LLC) counts the directions in which the loss rises at a minimum. At a regular minimum
# of d weights it is d/2; at a singular one it is less. We estimate it where it is known, with chains in bf16 and in 8
# bits, and then watch it in training.

# %%
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql

torch.manual_seed(0)
torch.set_num_threads(1)


def estimate(model, data, weights, **more):
    loss = ql.slt.supervised(lambda output, y, reduction: (output - y).square() / 2)
    settings = {"lr": 2e-3, "localization": 1.0, "chains": 4, "draws": 200} | more
    return ql.slt.llc(model, DataLoader(data, batch_size=100), loss, weights=weights, **settings)


# %% [markdown]
# ## A regular model: d/2
#
# Linear regression with seven inputs and a bias has eight weights, so the coefficient is 4. The weights have to be *at*
# the minimum.

# %%
x = torch.randn(400, 7)
y = x @ torch.randn(7, 1) + torch.randn(400, 1)
line = nn.Linear(7, 1)
with torch.no_grad():
    solution = torch.linalg.lstsq(torch.cat((x, torch.ones(400, 1)), 1), y).solution
    line.weight.copy_(solution[:-1].T)
    line.bias.copy_(solution[-1])
for weights in ("bf16", "bfp8"):
    print(f"{weights}:", estimate(line, TensorDataset(x, y), weights))

# %% [markdown]
# ## A singular model: less
#
# Two linear layers with nothing between them, 4-4-1, compute a linear function of four inputs: four of the 20 weights
# count. Where the function is not zero the rest are directions in which nothing changes, and the coefficient is 4/2 =
# 2, not 10.

# %%
x = torch.randn(400, 4)
y = x @ torch.tensor([[1.0], [-1.0], [0.5], [0.5]]) + torch.randn(400, 1)
deep = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
optimizer = torch.optim.LBFGS(deep.parameters(), max_iter=200)


def closure():
    optimizer.zero_grad()
    loss = (deep(x) - y).square().mean() / 2
    loss.backward()
    return loss


optimizer.step(closure)
for lr, draws in ((2e-3, 200), (4e-4, 800)):
    print(f"lr={lr}:", estimate(deep, TensorDataset(x, y), "bfp8", lr=lr, draws=draws, chains=3))

# %% [markdown]
# The first estimate is too high, and more draws would not help: steps of finite length make a chain too hot where the
# loss is steep. **Make the steps smaller until the estimate stops changing**, and draw more of them.
#
# ## While a network learns
#
# A network with 16 hidden units learns a function that four can represent. The coefficient rises as it finds structure.
# Early on the weights are at no minimum, and the library warns of it.

# %%
x = torch.randn(600, 6)
y = (x @ torch.randn(6, 4)).tanh() @ torch.randn(4, 1) + 0.3 * torch.randn(600, 1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 1601):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean() / 2
    loss.backward()
    optimizer.step()
    if step in (100, 400, 1600):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ql.QLangevinWarning)
            found = estimate(model, TensorDataset(x, y), "bfp8", lr=1e-3, localization=20.0)
        print(f"step {step:4}: loss {loss.item():.3f}, LLC {found.mean:.2f} ± {found.stderr:.2f}")

# %% [markdown]
# `masks=` estimates parts of a model, `observables=` watches other data, `store=` makes a run resumable: [Learning
# coefficients](../learning-coefficients.md) has all of it, and a table for users of devinterp.
