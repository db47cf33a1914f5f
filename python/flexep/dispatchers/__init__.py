"""The dispatchers: one file each, one protocol class (`Backend`), one front (`Dispatcher`)."""

from flexep.dispatchers.dispatcher import AUTO, BACKENDS, Dispatcher

__all__ = ["AUTO", "BACKENDS", "Dispatcher"]
