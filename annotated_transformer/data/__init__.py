"""Text: our grammar, corpora from files and the network, and what is larger than memory."""
