"""Checkpoints: complete and verifiable, or not there."""
