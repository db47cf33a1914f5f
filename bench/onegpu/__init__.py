"""Benchmarks of single operations on one GPU; each module prints one JSON line a measurement."""
