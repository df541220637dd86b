"""``python -m qlangevin.gpu.check``: compare every kernel with the PyTorch path on this machine, and time them.

This is what to run first on a GPU. It needs nothing but the installed package, ends within two minutes, and prints one table to
paste into a report. Without a GPU the kernels run in Triton's interpreter, on small tensors, and nothing is timed.
"""
