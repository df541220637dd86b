"""SGLD as a torch optimizer: the step, packed parameters, learning-rate schedules, and a resumable data loader."""
