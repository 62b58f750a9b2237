"""Measurements that take longer than a test; see README.md."""
