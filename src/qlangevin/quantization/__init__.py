"""Number formats, random bits, rounding onto a grid, and tensors kept as integer codes."""

from . import qtensor_dispatch as qtensor_dispatch  # installs the handlers of QTensor's operations
from . import qtensor_memory as qtensor_memory  # installs the addresses of its numbers
