"""The names of the ways to fuse heads, for those who must not load torch to know them."""

from typing import Literal

FusionName = Literal["concatenation", "talking", "collaborative", "over-heads"]
