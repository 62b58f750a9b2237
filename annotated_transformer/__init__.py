"""The Transformer of "Attention Is All You Need", explained, tested and fast.

Defined in the chapter *The Annotated Transformer, rebuilt* (book/index.md).
"""

# Written from book/index.md: edit the chapter instead.

__version__ = "0.1.0"
