"""Runs on Ray: the only room that imports it."""
