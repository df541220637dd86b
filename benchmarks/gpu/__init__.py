"""Triton kernels looked at without a GPU: compile them, read the machine code, estimate what it costs."""
