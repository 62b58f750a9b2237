"""The Transformer of "Attention Is All You Need", explained, tested and fast."""

__version__ = "0.1.0"
