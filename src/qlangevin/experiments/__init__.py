"""The paper's experiments, reproduced: one a module, each with settings, a `run` that returns rows, and a picture."""
