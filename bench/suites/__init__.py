"""Suites of many benchmark runs: no_cliffs, side_by_side, scaleup."""
