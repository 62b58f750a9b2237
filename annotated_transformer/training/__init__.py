"""The modules that the chapters in ``book/training/`` define."""
# Written from the chapters in book/training/: edit them instead.
