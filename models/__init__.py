"""Model families, one folder each; start at `models/spec.py` (pure) or a family's `module.py` (torch)."""
