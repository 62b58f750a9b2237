"""A server for a trained system: a page to look at it, and a JSON endpoint to use it."""
