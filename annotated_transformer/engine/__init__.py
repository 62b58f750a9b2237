"""What keeps a long run alive: options, trainer, state, checkpoints, precision, journal."""
