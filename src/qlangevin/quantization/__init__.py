"""Number formats, random bits, rounding onto a grid, and tensors kept as integer codes."""

from . import qtensor_dispatch as qtensor_dispatch  # installs the handlers of QTensor's operations
