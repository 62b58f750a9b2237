# Written from the chapters in book/background/: edit them instead.
"""The modules that the chapters in ``book/background/`` define."""
