# %% [markdown]
# # First posterior
#
# We sample a model whose posterior is known in closed form, with 8-bit weights, and look whether the samples have the
# right uncertainty. It is regression in one dimension with a gap in the data: in the gap the model should say that it
# does not know.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import qlangevin as ql

torch.manual_seed(0)
torch.set_num_threads(1)
noise = 0.3  # standard deviation of the observations
x = torch.cat((torch.linspace(-3, -1, 30), torch.linspace(1.5, 3, 20)))
y = torch.sin(2 * x) + noise * torch.randn(len(x))
centers = torch.linspace(-3, 3, 9)


def features(x):
    return torch.exp(-((x[:, None] - centers) ** 2))


# %% [markdown]
# ## The exact posterior
#
# The model is linear in nine fixed features, with a prior N(0, 0.5²) on each weight. So the posterior is a Gaussian:

# %%
prior_std, phi = 0.5, features(x)
precision = phi.T @ phi / noise**2 + torch.eye(9) / prior_std**2
covariance = precision.inverse()
mean = covariance @ phi.T @ y / noise**2
grid = torch.linspace(-4, 4, 200)
exact_mean = features(grid) @ mean
exact_std = (features(grid) @ covariance * features(grid)).sum(1).sqrt()

# %% [markdown]
# ## Sampling in 8 bits
#
# Three things decide what is sampled. The **loss** is the mean over the data of the negative log-likelihood: the
# squared error over 2σ². **`num_data`** is N, the number of terms in that mean. **`prior_std`** is the prior. The
# sampler is an optimizer; the schedule says when to collect, and the store keeps the samples in one byte per weight.
#
# `fixed8.3` has multiples of 1/8 from -16 to 15.875. We run it twice: rounding after the noise was added
# (`"stochastic"`), and the variance-corrected rounding, which is the default. Chains differ by `stream`.


# %%
def sample(rounding, chains):
    for stream in range(chains):
        model = nn.Linear(9, 1, bias=False)
        sampler = ql.SGLD(
            model.named_parameters(),
            lr=0.06,
            num_data=len(x),
            prior_std=prior_std,
            weights="fixed8.3",
            rounding=rounding,
            seed=1,
            stream=stream,
        )
        schedule = ql.ConstantLR(sampler, total_steps=8000, samples=100, burn_in=0.2)
        with ql.SampleStore.create(f"{rounding}/chain-{stream}", model, sampler, schedule) as store:
            for _ in range(schedule.total_steps):
                sampler.zero_grad()
                loss = ((model(phi).squeeze(1) - y) ** 2).mean() / (2 * noise**2)
                loss.backward()
                sampler.step()
                schedule.step()
                if schedule.collect:
                    store.append(model)
    return ql.Posterior.open(rounding, model, link="identity", noise=noise**2), sampler


naive, naive_sampler = sample("stochastic", chains=1)
corrected, sampler = sample("corrected", chains=3)
print(len(corrected), "samples,", corrected.members[0].store[0].nbytes, "bytes each")

# %% [markdown]
# ## Is it right?
#
# The posterior opens all chains. `samples` gives the prediction of every sample; their standard deviation, over the
# exact one, should be 1:


# %%
def spread(posterior):
    return torch.stack([s.squeeze(1) for s in posterior.samples(features(grid))]).std(0)


gap = (grid > -1) & (grid < 1.5)
for name, posterior in (("naive", naive), ("corrected", corrected)):
    ratio = spread(posterior) / exact_std
    print(f"{name:10} width of the band over the exact one: {ratio.mean():.2f}, in the gap {ratio[gap].mean():.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axis, name, posterior in ((axes[0], "naive rounding", naive), (axes[1], "corrected rounding", corrected)):
    std = spread(posterior)
    middle = torch.stack([s.squeeze(1) for s in posterior.samples(features(grid))]).mean(0)
    axis.fill_between(grid, middle - 2 * std, middle + 2 * std, alpha=0.3, label="8 bits")
    for sign in (-2, 2):
        axis.plot(grid, exact_mean + sign * exact_std, "k--", linewidth=1, label="exact" if sign > 0 else None)
    axis.plot(x, y, "k.", markersize=3)
    axis.set_title(name)
axes[0].legend()
figure.tight_layout()
figure.savefig("first-posterior.png", dpi=120)

# %% [markdown]
# ![Bands of two standard deviations, naive and corrected, and the exact one](first-posterior.png)
#
# ## Could we have known?
#
# Yes. `diagnose()` compares what a step adds with what was asked for. For the naive chain it says that the effective
# temperature is too high, and what would repair it:

# %%
print(naive_sampler.diagnose())

# %% [markdown]
# The corrected chain passes. It stays where the gradients are smaller, and that is what the grid has to resolve:

# %%
print("the bits suffice:", sampler.diagnose().sufficient)

# %% [markdown]
# Have the chains converged? R-hat compares them, and should be close to 1. Here it is for the worst prediction, with
# the effective sample sizes of the bulk and the tails:

# %%
draws = ql.diagnostics.predictions(corrected, features(grid[::20]))
r_hat, bulk, tail = ql.diagnostics.summarize(draws).worst
print(f"R-hat {r_hat:.2f}, effective sample size {bulk:.0f} (bulk), {tail:.0f} (tails)")

# %% [markdown]
# Next: [a CNN with everything in 8 bits](cnn.md).
