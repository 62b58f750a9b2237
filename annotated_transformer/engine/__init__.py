"""Long training runs: options, trainer, state, checkpoints, precision and journal."""
