"""The dispatchers: one file each, one protocol class (`Backend`), one front (`Dispatcher`)."""

from flexep.dispatchers.dispatcher import BACKENDS, Dispatcher

__all__ = ["BACKENDS", "Dispatcher"]
