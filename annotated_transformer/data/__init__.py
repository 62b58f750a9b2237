"""Text data: the grammar, corpora from files or the network, and corpora larger than memory."""
