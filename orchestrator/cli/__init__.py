"""The commands, one file each; `main.py` takes a command line apart and hands it to one of them."""
