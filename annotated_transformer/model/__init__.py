# Written from the chapters in book/model/: edit them instead.
"""The modules that the chapters in ``book/model/`` define."""
