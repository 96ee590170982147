"""The command line: `sparseflow`, `sf-pack` and `sf-bench`."""
