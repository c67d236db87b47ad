"""The training engine on torch: mesh, ordered build, step and loop. Never imports ray. Start at `rank.py`."""
