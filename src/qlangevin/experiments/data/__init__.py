"""Data sets: files found or downloaded, read, and served as batches of examples; `datasets` is the entry point."""
