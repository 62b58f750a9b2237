"""Text: a grammar of our own, corpora from files and the network, and what is larger than memory."""
