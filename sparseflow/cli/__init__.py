"""The command line: `sparseflow` and `sf-pack`."""
