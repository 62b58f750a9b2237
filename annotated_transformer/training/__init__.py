# Written from the chapters in book/training/: edit them instead.
"""The modules that the chapters in ``book/training/`` define."""
