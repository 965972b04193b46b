"""Losses, training data and training of retrievers."""
