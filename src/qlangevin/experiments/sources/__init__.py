"""Where data sets come from: files found or fetched, read, and handed out as examples. `experiments.data` is the way in."""
