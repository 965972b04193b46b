"""Pydantic models of what the user writes (config), what flows (rows) and what is released."""
