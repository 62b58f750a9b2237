# Written from the chapters in book/results/: edit them instead.
"""The modules that the chapters in ``book/results/`` define."""
