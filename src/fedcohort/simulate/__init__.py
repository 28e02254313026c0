"""The simulator: datasets, models, the batched training engine and the lock-step runner."""
