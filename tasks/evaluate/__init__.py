"""Figures of quality: of generated grades today, of retrievers later."""
