"""The modules that the chapters in ``book/model/`` define."""
# Written from the chapters in book/model/: edit them instead.
