"""torch.compile, block by block: all blocks are alike, so one is compiled and the others reuse it.

The block's own forward is compiled, not the module, so that parameter names stay what they are and the hooks of data
parallelism run outside of the compiled code.
"""

from __future__ import annotations

import torch
from torch import nn


def apply_compile(blocks: list[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward of every block for the shapes that it first sees, in place."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)
