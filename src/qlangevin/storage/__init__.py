"""Samples and checkpoints on disk: safetensors and JSON, written atomically, checksummed, resumable."""
