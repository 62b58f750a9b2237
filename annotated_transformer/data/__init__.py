"""Where the text of a training run comes from."""
