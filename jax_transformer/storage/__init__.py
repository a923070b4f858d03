"""Files of weights, read and written as ``{name: array}``."""
