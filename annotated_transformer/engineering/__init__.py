"""The modules that the chapters in ``book/engineering/`` define."""
# Written from the chapters in book/engineering/: edit them instead.
