"""Replay attempts against rates, without changing any counter."""

from .operations.replay import replay

__all__ = ["replay"]
