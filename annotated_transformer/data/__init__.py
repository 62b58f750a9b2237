"""Data by hand: files, text, downloads and corpora."""
