"""FlexEP: dispatch and combine for Mixture-of-Experts expert parallelism."""

__version__ = "0.1.0"
