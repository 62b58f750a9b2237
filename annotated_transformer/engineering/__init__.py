# Written from the chapters in book/engineering/: edit them instead.
"""The modules that the chapters in ``book/engineering/`` define."""
