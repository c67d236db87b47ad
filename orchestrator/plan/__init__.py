"""Planning: values in, values out. See README.md; `make.py` is the way in."""
