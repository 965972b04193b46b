"""Requests in, completions out."""
