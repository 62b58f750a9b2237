# Written from the chapters in book/translation/: edit them instead.
"""The modules that the chapters in ``book/translation/`` define."""
