"""The benchmark contract: cases, libraries, timing and checks, behind `flexep bench` and `pytest bench`."""
