"""Suites of many benchmark runs: no_cliffs, side_by_side, scaleup; and what they have left as figures."""
