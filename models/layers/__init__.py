"""Torch layers that more than one family is built from."""
