"""Number formats, random bits, rounding onto a grid, and tensors kept as integer codes."""
