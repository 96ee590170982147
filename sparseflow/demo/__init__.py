"""A small trained checkpoint of the real architecture, as package data; tools/demo tells how it was made."""
