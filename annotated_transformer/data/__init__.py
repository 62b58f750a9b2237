"""Text: a grammar of our own, corpora from files and from the network, however large."""
