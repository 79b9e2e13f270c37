"""kvbench: at this memory, how much of the dense model is left, and what does it cost?"""

from __future__ import annotations

from importlib.metadata import version

from kvbench.api import evict, load_results, run

__version__ = version("kvbench")

__all__ = ["__version__", "evict", "load_results", "run"]
