"""Rank pools, conformance cases and their comparison with the oracle: what the tests and `flexep verify`
share."""
