"""Everything about R GPUs of one host in under eight minutes: `python -m bench.suites.scaleup`."""
