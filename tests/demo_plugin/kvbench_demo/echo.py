"""A task of a third party."""

from __future__ import annotations


class DemoEcho:
    """Stands for a task; the registry test only loads it."""
