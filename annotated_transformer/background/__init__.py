"""The modules that the chapters in ``book/background/`` define."""
# Written from the chapters in book/background/: edit them instead.
