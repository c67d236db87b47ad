"""Ranks on slots: pure."""
